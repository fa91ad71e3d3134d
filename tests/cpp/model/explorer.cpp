#include "explorer.h"

#include <cxxabi.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <random>
#include <sstream>
#include <thread>

#include "stream/futex.h"

namespace model {
namespace {

// What one knows of accesses to plain memory: a bit for the latest write to each place, and one
// for each thread's latest read of it. An acquire learns what the release that it reads from knew.
__extension__ typedef unsigned __int128 Knowledge;
constexpr int kKnowledgeBits = 128;

constexpr int kMostThreads = 8;
constexpr std::size_t kMemoryBytes = std::size_t{1} << 22;
constexpr std::size_t kStackBytes = std::size_t{1} << 18;
constexpr std::size_t kMostWords = 2048;
constexpr std::size_t kWalks = 400;
constexpr std::size_t kWalkSteps = 2000;

using WordId = std::uint16_t;
constexpr WordId kNone = 0xffff;

enum class Kind : std::uint8_t {
  step,           // a thread makes its next access
  step_and_die,   // and its rank goes no further
  step_and_stop,  // the same, and nobody can see it
  time_out,       // a thread's sleep ends, for no reason or because its slice is over
  pass,           // a deadline passes for all who have begun to wait
  show_death,     // others can see that a rank has died
};
struct Choice {
  Kind kind;
  std::uint8_t who;
  std::uint8_t age = 0;  // of what a load reads: how many stores came after it
};
using Code = std::uint16_t;
constexpr std::size_t kMostAges = 32;
Code pack(Choice choice) {
  return static_cast<Code>(static_cast<unsigned>(choice.kind) << 10 | choice.age << 5U |
                           choice.who);
}
Choice unpack(Code code) {
  return {static_cast<Kind>(code >> 10), static_cast<std::uint8_t>(code & 31),
          static_cast<std::uint8_t>(code >> 5 & 31)};
}

enum class State : std::uint8_t { ready, asleep, polls, locks, over };

// Of each weak word the oldest store that one may still read: the stores to it are numbered. As
// knowledge is, it is released and acquired.
constexpr std::size_t kMostWeak = 32;
using View = std::array<std::uint8_t, kMostWeak>;

void join(View& into, const View& other) {
  for (std::size_t i = 0; i < kMostWeak; ++i) into[i] = std::max(into[i], other[i]);
}

// A store that others may still read, though a later one was made.
struct Older {
  std::uint64_t value;
  Knowledge knowledge;
  View view;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  jmp_buf base;  // where it waits for a body
  jmp_buf here;
  bool begun = false;
  void* caught = nullptr;  // of the Itanium C++ ABI's __cxa_eh_globals
  unsigned uncaught = 0;

  int rank = 0;
  std::function<void()> body;
  State state = State::over;
  WordId waits_on = kNone;  // sleeps, polls or locks
  std::uint64_t waits_value = 0;
  std::uint64_t history = 0;  // what it has read: its locals follow from this
  std::uint64_t locals = 0;   // what `forget_all_but` gave
  WordId last_load = kNone;
  std::uint64_t last_value = 0;
  WordId polled = kNone;  // the same of its latest load, though others had no part in it
  std::uint64_t polled_value = 0;
  std::uint64_t before_poll = 0;
  bool clocked = false;  // has begun to wait, at
  std::uint64_t since = 0;
  int clock_reads = 0;
  bool owed = false;  // by
  int ower = 0;
  Knowledge knows = 0;
  View seen{};
  const char* doing = "";
  WordId at = kNone;
  bool reads_weak = false;  // its present access is a load of a weak word,
  bool is_seq_cst = false;  // and of this order
};

struct Word {
  Knowledge knowledge = 0;    // what its latest store released,
  View view{};                // and this
  std::uint64_t content = 0;  // as far as it is significant
  std::uint64_t hash = 0;     // its part of the state's
  std::vector<Older> older;   // of a weak word: its stores before the latest, the first one first
  std::size_t latest_seq_cst = 0;
};

// Which threads have ever used a word, in any run of this program.
struct Use {
  Mask users = 0;
  Mask writers = 0;
  bool is_weak = false;  // some access to it is weaker than sequentially consistent
};

struct Plain {
  const void* place = nullptr;
  const char* property = "P6";
  bool written = false;
  Mask readers = 0;           // since it was written
  std::uint64_t content = 0;  // follows from what its writer knew
};

struct Edge {
  std::uint32_t from;
  std::uint32_t to;
  Kind kind;
};

// 64-bit hashes of states, each with its number.
class Seen {
 public:
  Seen() { grow(1 << 16); }
  // The number of `hash`, and whether it is new.
  std::pair<std::uint32_t, bool> insert(std::uint64_t hash) {
    if (size_ * 10 > hashes_.size() * 6) grow(hashes_.size() * 2);
    std::size_t i = hash & (hashes_.size() - 1);
    while (hashes_[i] != 0) {
      if (hashes_[i] == hash) return {numbers_[i], false};
      i = (i + 1) & (hashes_.size() - 1);
    }
    hashes_[i] = hash;
    numbers_[i] = static_cast<std::uint32_t>(size_);
    return {static_cast<std::uint32_t>(size_++), true};
  }

 private:
  void grow(std::size_t capacity) {
    std::vector<std::uint64_t> hashes(capacity, 0);
    std::vector<std::uint32_t> numbers(capacity, 0);
    for (std::size_t j = 0; j < hashes_.size(); ++j) {
      if (hashes_[j] == 0) continue;
      std::size_t i = hashes_[j] & (capacity - 1);
      while (hashes[i] != 0) i = (i + 1) & (capacity - 1);
      hashes[i] = hashes_[j];
      numbers[i] = numbers_[j];
    }
    hashes_.swap(hashes);
    numbers_.swap(numbers);
  }
  std::vector<std::uint64_t> hashes_;
  std::vector<std::uint32_t> numbers_;
  std::size_t size_ = 0;
};

enum class Mode : std::uint8_t { walk, explore, show };

// ---- The present run.

alignas(4096) char memory[kMemoryBytes];
std::size_t memory_used = 0;
bool in_memory = false;  // whether `operator new` takes from it
std::array<WordId, kMemoryBytes / 4> word_at;
std::size_t words_known = 0;
std::array<const void*, kMostWords> place_of;
std::array<bool, kMostWords> is_quiet_word;        // as the scenario says
std::array<std::uint8_t, kMostWords> weak_number;  // of a weak word, in views
std::vector<WordId> weak_words;
std::array<Word, kMostWords> words;
std::array<Use, kMostWords> uses;   // as learnt so far
std::array<Use, kMostWords> facts;  // as learnt before this exploration
std::uint64_t memory_hash = 0;

std::array<Fiber, kMostThreads> fibers;
int num_fibers = 0;
int running = -1;  // -1: none, and accesses are plain
jmp_buf main_here;
std::vector<Plain> plains;
std::uint64_t epoch = 1;
Mask halted = 0;
Mask dead = 0;
Mask shown = 0;
int faults_left = 0;
Scenario* scenario = nullptr;
World world;
bool told_end = false;

// ---- The exploration.

Mode mode = Mode::walk;
std::vector<Code> path;  // to be repeated
std::size_t cursor = 0;
std::vector<Code> taken;
Choice last{Kind::step, 0};
std::uint32_t state_before = 0;
bool has_before = false;
std::mt19937_64 random_bits;
bool learnt = false;
Result result;
std::size_t most_states = 0;

struct Graph {
  Seen seen;
  std::vector<std::uint32_t> parents;
  std::vector<Code> choices;
  std::vector<Edge> edges;
  std::vector<std::uint32_t> ends;
  struct Pending {
    std::uint32_t state;
    Code choice;
  };
  std::deque<Pending> pending;
};
std::unique_ptr<Graph> graph;

// The explorer's own allocations, while a fiber runs.
class Outside {
 public:
  Outside() : before_(in_memory) { in_memory = false; }
  ~Outside() { in_memory = before_; }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  bool before_;
};

struct EhGlobals {
  void* caught;
  unsigned uncaught;
};
EhGlobals& eh_globals() { return *reinterpret_cast<EhGlobals*>(abi::__cxa_get_globals()); }

void save(Fiber& fiber) {
  fiber.caught = eh_globals().caught;
  fiber.uncaught = eh_globals().uncaught;
}

[[noreturn]] void to_main() {
  if (running >= 0) save(fibers[static_cast<std::size_t>(running)]);
  eh_globals() = {nullptr, 0};
  running = -1;
  in_memory = false;
  _longjmp(main_here, 1);
}

[[noreturn]] void enter(Fiber& fiber) {
  eh_globals() = {fiber.caught, fiber.uncaught};
  in_memory = true;
  if (!fiber.begun) {
    fiber.begun = true;
    _longjmp(fiber.base, 1);
  }
  _longjmp(fiber.here, 1);
}

void switch_to(int thread) {
  if (thread == running) return;
  Fiber& to = fibers[static_cast<std::size_t>(thread)];
  if (running >= 0) {
    Fiber& from = fibers[static_cast<std::size_t>(running)];
    save(from);
    running = thread;
    if (_setjmp(from.here) == 0) enter(to);
    return;
  }
  running = thread;
  enter(to);
}

WordId id_of(const void* place) {
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(place) - memory);
  if (offset >= kMemoryBytes) {
    std::fprintf(stderr, "model: an Atomic that is not in memory made by a run\n");
    std::abort();
  }
  WordId& id = word_at[offset / 4];
  if (id == kNone) {
    if (words_known == kMostWords) std::abort();
    place_of[words_known] = place;
    is_quiet_word[words_known] = scenario->is_quiet(place);
    id = static_cast<WordId>(words_known++);
  }
  return id;
}

std::uint64_t raw(const void* place, std::size_t bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, place, bytes);
  return value;
}

std::uint64_t hash_of(const Knowledge& knowledge) {
  return mix(static_cast<std::uint64_t>(knowledge), static_cast<std::uint64_t>(knowledge >> 64));
}

void rehash(std::size_t id) {
  Word& word = words[id];
  memory_hash ^= word.hash;
  const bool fresh = word.content == 0 && word.knowledge == 0;
  word.hash = fresh ? 0 : mix(mix(id, word.content), hash_of(word.knowledge));
  memory_hash ^= word.hash;
}

void write(WordId id, void* place, std::size_t bytes, std::uint64_t value, Knowledge knowledge,
           const View& view) {
  std::memcpy(place, &value, bytes);
  words[id].knowledge = knowledge;
  words[id].view = view;
  words[id].content = is_quiet_word[id] ? value : scenario->significant(place, value);
  rehash(id);
}

// A release sequence goes on through read-modify-writes, and ends at any other store.
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}
bool acquires(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_release;
}

bool is_out(const Fiber& fiber) { return (halted >> fiber.rank & 1) != 0; }

// Who may read which older stores. Those that nobody can read any more are of no consequence.
std::uint64_t hash_of_views() {
  View oldest;
  oldest.fill(0xff);
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (is_out(fiber) || fiber.state == State::over) continue;
    for (std::size_t w = 0; w < kMostWeak; ++w) oldest[w] = std::min(oldest[w], fiber.seen[w]);
  }
  const auto hash_of_view = [&](const View& view) {
    std::uint64_t hash = 0;
    for (std::size_t w = 0; w < weak_words.size(); ++w) {
      if (view[w] > oldest[w]) hash = mix(hash, w << 8 | (view[w] - oldest[w]));
    }
    return hash;
  };
  std::uint64_t hash = 0;
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (!is_out(fiber)) hash = mix(hash, hash_of_view(fiber.seen));
  }
  for (std::size_t id = 0; id < words_known; ++id) {
    const std::uint64_t view = hash_of_view(words[id].view);
    if (view != 0) hash = mix(mix(hash, id), view);
  }
  for (std::size_t w = 0; w < weak_words.size(); ++w) {
    const Word& word = words[weak_words[w]];
    for (std::size_t k = oldest[w]; k < word.older.size(); ++k) {
      const Older& older = word.older[k];
      hash = mix(mix(hash, older.value), mix(hash_of(older.knowledge), hash_of_view(older.view)));
      hash = mix(hash, k < word.latest_seq_cst ? 1 : 0);
    }
    hash = mix(hash, w);
  }
  return hash;
}

std::uint64_t state_hash() {
  std::uint64_t hash = mix(memory_hash, scenario->hash());
  if (world.weak) hash = mix(hash, hash_of_views());
  hash = mix(hash, (static_cast<std::uint64_t>(halted) << 32) | (dead << 16) | (shown << 8) |
                       static_cast<std::uint64_t>(faults_left));
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (halted >> fiber.rank & 1) continue;  // what it was at is of no consequence
    hash = mix(mix(hash, fiber.history), fiber.state == State::polls ? fiber.waits_value : 0);
    hash = mix(hash, static_cast<std::uint64_t>(fiber.state) |
                         static_cast<std::uint64_t>(fiber.waits_on) << 8 |
                         static_cast<std::uint64_t>(fiber.clocked) << 24 |
                         static_cast<std::uint64_t>(fiber.clocked && fiber.since < epoch) << 25 |
                         static_cast<std::uint64_t>(fiber.owed) << 26 |
                         static_cast<std::uint64_t>(fiber.owed ? fiber.ower : 0) << 27);
    hash = mix(hash, hash_of(fiber.knows));
  }
  for (const Plain& plain : plains) {
    if (plain.written) hash = mix(mix(hash, plain.content), plain.readers);
  }
  return hash == 0 ? 1 : hash;
}

bool is_weak(WordId id) {
  return world.weak && mode != Mode::walk && facts[id].is_weak && !is_quiet_word[id];
}

// What the store of this number to a weak word has written.
std::uint64_t value_of(WordId id, std::size_t number, std::size_t bytes) {
  const Word& word = words[id];
  return number < word.older.size() ? word.older[number].value : raw(place_of[id], bytes);
}

// Whether a load may find another value than it has found.
bool may_change(const Fiber& fiber) {
  const WordId id = fiber.waits_on;
  const std::size_t latest = words[id].older.size();
  for (std::size_t k = is_weak(id) ? fiber.seen[weak_number[id]] : latest; k <= latest; ++k) {
    if (value_of(id, k, 4) != fiber.waits_value) return true;
  }
  return false;
}

bool can_step(const Fiber& fiber) {
  if (is_out(fiber)) return false;
  switch (fiber.state) {
    case State::ready:
      return true;
    case State::polls:
    case State::locks:
      return may_change(fiber);
    case State::asleep:
    case State::over:
      return false;
  }
  return false;
}

// How many stores its present access may read: no older one than it knows of, and, if it is
// sequentially consistent, than the latest of those that are.
std::size_t ages(const Fiber& fiber) {
  if (fiber.state != State::ready || !fiber.reads_weak) return 1;
  const Word& word = words[fiber.at];
  std::size_t oldest = fiber.seen[weak_number[fiber.at]];
  if (fiber.is_seq_cst) oldest = std::max(oldest, word.latest_seq_cst);
  return word.older.size() - oldest + 1;
}

// All that may happen now.
using Options = std::array<Code, kMostThreads*(kMostAges + 4) + kMostRanks>;
std::size_t list(Options& out) {
  std::size_t n = 0;
  const auto may = [&](Kind kind, int who, std::size_t age = 0) {
    out[n++] = pack({kind, static_cast<std::uint8_t>(who), static_cast<std::uint8_t>(age)});
  };
  bool can_pass = false;
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (is_out(fiber) || fiber.state == State::over) continue;
    can_pass |= fiber.clocked && fiber.since == epoch;
    if (!can_step(fiber)) continue;
    for (std::size_t age = 0; age < ages(fiber); ++age) may(Kind::step, i, age);
    if (faults_left == 0) continue;
    if (world.may_die >> fiber.rank & 1) may(Kind::step_and_die, i);
    if (world.may_stop >> fiber.rank & 1) may(Kind::step_and_stop, i);
  }
  const bool idle = n == 0;
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (is_out(fiber) || fiber.state != State::asleep) continue;
    if (idle || world.wakes_needlessly) may(Kind::time_out, i);
  }
  for (int r = 0; r < kMostRanks; ++r) {
    if ((dead & ~shown) >> r & 1) may(Kind::show_death, r);
  }
  if (can_pass && (world.time == Time::any || (world.time == Time::when_idle && idle))) {
    may(Kind::pass, 0);
  }
  return n;
}

bool all_over() {
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (!is_out(fiber) && fiber.state != State::over) return false;
  }
  return true;
}

void tell_end() {
  if (told_end) return;
  told_end = true;
  scenario->ended();
}

// Chooses, or returns false: nothing may happen any more, or all that follows is known.
bool choose(Choice& choice) {
  if (cursor < path.size()) {
    choice = unpack(path[cursor++]);
    return true;
  }
  const Outside outside;
  Options options;
  if (mode == Mode::show) return false;
  if (mode == Mode::walk) {
    const std::size_t n = list(options);
    if (all_over()) tell_end();
    if (n == 0 || taken.size() > kWalkSteps) return false;
    choice = unpack(options[random_bits() % n]);
    return true;
  }
  const auto [state, is_new] = graph->seen.insert(state_hash());
  if (has_before) graph->edges.push_back({state_before, state, last.kind});
  if (!is_new) return false;
  graph->parents.push_back(has_before ? state_before : state);
  graph->choices.push_back(pack(last));
  const std::size_t n = list(options);
  if (all_over()) {
    graph->ends.push_back(state);
    tell_end();
  }
  if (n == 0) return false;
  for (std::size_t i = 1; i < n; ++i) graph->pending.push_back({state, options[i]});
  state_before = state;
  has_before = true;
  choice = unpack(options[0]);
  return true;
}

void describe(Choice choice) {
  const Outside outside;
  std::ostringstream line;
  const Fiber& fiber = fibers[choice.who];
  const std::string thread = "rank " + std::to_string(fiber.rank) + ", thread " +
                             std::to_string(static_cast<int>(choice.who)) + ": ";
  switch (choice.kind) {
    case Kind::step:
    case Kind::step_and_die:
    case Kind::step_and_stop:
      line << thread << fiber.doing;
      if (fiber.at != kNone) {
        line << " " << scenario->name_of(place_of[fiber.at]) << " (is "
             << raw(place_of[fiber.at], 4) << ")";
        if (choice.age > 0) line << " of " << static_cast<int>(choice.age) << " stores before";
      }
      if (choice.kind == Kind::step_and_die) line << ", and the rank dies";
      if (choice.kind == Kind::step_and_stop) line << ", and the rank is stopped for ever";
      break;
    case Kind::time_out:
      line << thread << "its sleep times out";
      break;
    case Kind::pass:
      line << "a deadline passes";
      break;
    case Kind::show_death:
      line << "rank " << static_cast<int>(choice.who) << "'s death can be seen";
      break;
  }
  result.trace.push_back(line.str());
}

void halt(int rank, bool dies) {
  halted |= 1U << rank;
  if (dies) dead |= 1U << rank;
  --faults_left;
}

// Goes on with the run: until this fiber is to go on, if one calls it.
void go_on() {
  for (;;) {
    if (!taken.empty()) {
      if (last.kind == Kind::step_and_die || last.kind == Kind::step_and_stop) {
        halt(fibers[last.who].rank, last.kind == Kind::step_and_die);
      }
      const Outside outside;
      scenario->look(last.kind == Kind::step || last.kind == Kind::step_and_die ||
                             last.kind == Kind::step_and_stop || last.kind == Kind::time_out
                         ? last.who
                         : -1);
    }
    Choice choice;
    if (!choose(choice)) to_main();
    if (mode == Mode::show) describe(choice);
    {
      const Outside outside;
      taken.push_back(pack(choice));
    }
    last = choice;
    Fiber& fiber = fibers[choice.who];
    switch (choice.kind) {
      case Kind::step:
      case Kind::step_and_die:
      case Kind::step_and_stop:
      case Kind::time_out:
        if (choice.kind == Kind::time_out) fiber.owed = false;
        fiber.state = State::ready;
        return switch_to(choice.who);
      case Kind::pass: {
        const Outside outside;
        scenario->time_passes();
        ++epoch;
        break;
      }
      case Kind::show_death: {
        const Outside outside;
        shown |= 1U << choice.who;
        scenario->died(choice.who);
        break;
      }
    }
  }
}

Fiber& me() { return fibers[static_cast<std::size_t>(running)]; }

void note_use(WordId id, bool writes, std::memory_order order = std::memory_order_seq_cst) {
  const Mask bit = 1U << running;
  Use& use = uses[id];
  if (order != std::memory_order_seq_cst && !use.is_weak && !is_quiet_word[id]) {
    const Outside outside;
    if (weak_words.size() == kMostWeak) std::abort();
    weak_number[id] = static_cast<std::uint8_t>(weak_words.size());
    weak_words.push_back(id);
    use.is_weak = learnt = true;
  }
  if ((use.users & bit) == 0 || (writes && (use.writers & bit) == 0)) {
    use.users |= bit;
    if (writes) use.writers |= bit;
    learnt = true;
  }
}

// Nobody else can tell when such an access is made: the word never changes, or it is this thread's
// alone, or this thread alone writes it and now reads it.
bool is_own(WordId id, bool writes) {
  if (mode == Mode::walk) return false;
  const Mask bit = 1U << running;
  const Use& fact = facts[id];
  return fact.writers == 0 || fact.users == bit || (!writes && fact.writers == bit);
}
bool is_quiet(WordId id, bool writes) { return is_own(id, writes) || is_quiet_word[id]; }

// Before an access: others may go first.
void before_access(const char* doing, WordId id, bool reads_weak = false) {
  Fiber& fiber = me();
  fiber.doing = doing;
  fiber.at = id;
  fiber.reads_weak = reads_weak;
  fiber.state = State::ready;
  go_on();
}

void remember(Fiber& fiber, std::uint64_t what) { fiber.history = mix(fiber.history, what); }

void acquire(Fiber& fiber, const Knowledge& knowledge, const View& view) {
  fiber.knows |= knowledge;
  join(fiber.seen, view);
}

// The running thread's store. Stores to one word have one order, which is that in which they are
// made: of a word that is not always changed by read-modify-writes, one thread alone makes them.
void make_store(WordId id, void* place, std::size_t bytes, std::uint64_t value,
                std::memory_order order, Knowledge knowledge, View view) {
  Fiber& fiber = me();
  Word& word = words[id];
  const bool weak = is_weak(id);
  const std::size_t latest = word.older.size();
  if (releases(order)) {
    knowledge |= fiber.knows;
    join(view, fiber.seen);
  }
  if (weak) {
    const Outside outside;
    std::uint8_t& number = view[weak_number[id]];
    number = static_cast<std::uint8_t>(latest);
    const bool is_new_order = order == std::memory_order_seq_cst && word.latest_seq_cst < latest;
    // To whoever reads it, the same again is the same store.
    if (raw(place, bytes) == value && word.knowledge == knowledge && word.view == view &&
        !is_new_order) {
      return;
    }
    if (++number == kMostAges) std::abort();
    word.older.push_back({raw(place, bytes), word.knowledge, word.view});
    fiber.seen[weak_number[id]] = number;
    if (order == std::memory_order_seq_cst) word.latest_seq_cst = number;
  }
  write(id, place, bytes, value, knowledge, view);
}

ucontext_t main_context;

void fiber_main(int index) {
  Fiber& fiber = fibers[static_cast<std::size_t>(index)];
  if (_setjmp(fiber.base) == 0) swapcontext(&fiber.context, &main_context);
  forget_all_but(0xbe9);
  me().body();
  Fiber& done = me();
  done.state = State::over;
  done.doing = "ends";
  done.at = kNone;
  done.history = mix(done.locals, 0xe0d);
  go_on();
  std::abort();
}

void make_fibers() {
  for (int i = 0; i < kMostThreads; ++i) {
    Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (fiber.stack) continue;
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(fiber_main), 1, i);
    swapcontext(&main_context, &fiber.context);
  }
}

void forget_fiber(Fiber& fiber) {
  // Exceptions that it was handling.
  eh_globals() = {fiber.caught, 0};
  while (eh_globals().caught != nullptr) abi::__cxa_end_catch();
  fiber.caught = nullptr;
  fiber.uncaught = 0;
  fiber.begun = false;
  fiber.body = nullptr;
  fiber.state = State::over;
  fiber.history = fiber.locals = 0;
  fiber.last_load = kNone;
  fiber.clocked = fiber.owed = false;
  fiber.clock_reads = 0;
  fiber.waits_on = kNone;
  fiber.knows = 0;
  fiber.seen = {};
  fiber.reads_weak = false;
}

// One run: `path`, and then what `choose` says.
void run() {
  for (int i = 0; i < num_fibers; ++i) forget_fiber(fibers[static_cast<std::size_t>(i)]);
  num_fibers = 0;
  plains.clear();
  memory_used = 0;
  memory_hash = 0;
  std::fill_n(words.begin(), words_known, Word{});
  epoch = 1;
  halted = dead = shown = 0;
  world = scenario->world();
  faults_left = world.faults;
  cursor = 0;
  taken.clear();
  has_before = has_before && mode == Mode::explore;
  told_end = false;
  running = -1;
  in_memory = true;
  scenario->start();
  in_memory = false;
  if (_setjmp(main_here) == 0) go_on();
  in_memory = false;
}

std::vector<Code> path_to(std::uint32_t state) {
  std::vector<Code> steps;
  while (graph->parents[state] != state) {
    steps.push_back(graph->choices[state]);
    state = graph->parents[state];
  }
  return {steps.rbegin(), steps.rend()};
}

// A state from which no end can be reached by such transitions, or -1.
template <class Allowed>
std::int64_t state_without_end(Allowed allowed) {
  const std::size_t states = graph->parents.size();
  std::vector<std::uint32_t> first(states + 1, 0);
  for (const Edge& edge : graph->edges) ++first[edge.to + 1];
  for (std::size_t i = 0; i < states; ++i) first[i + 1] += first[i];
  std::vector<std::uint32_t> next(first.begin(), first.end() - 1);
  std::vector<std::uint32_t> from(graph->edges.size());
  for (std::size_t i = 0; i < graph->edges.size(); ++i) {
    const Edge& edge = graph->edges[i];
    from[next[edge.to]++] = allowed(edge.kind) ? edge.from : edge.to;
  }
  std::vector<bool> ends(states, false);
  std::vector<std::uint32_t> stack(graph->ends);
  for (const std::uint32_t state : stack) ends[state] = true;
  while (!stack.empty()) {
    const std::uint32_t state = stack.back();
    stack.pop_back();
    for (std::uint32_t i = first[state]; i < first[state + 1]; ++i) {
      if (ends[from[i]]) continue;
      ends[from[i]] = true;
      stack.push_back(from[i]);
    }
  }
  for (std::size_t i = 0; i < states; ++i) {
    if (!ends[i]) return static_cast<std::int64_t>(i);
  }
  return -1;
}

bool is_fault(Kind kind) { return kind == Kind::step_and_die || kind == Kind::step_and_stop; }

void check_ends() {
  std::int64_t stuck = state_without_end([](Kind kind) { return !is_fault(kind); });
  if (stuck >= 0) {
    result.violated = true;
    result.violation = {"P1", "a rank waits without end"};
  } else if (scenario->ends_without_timeouts()) {
    stuck = state_without_end(
        [](Kind kind) { return !is_fault(kind) && kind != Kind::time_out && kind != Kind::pass; });
    if (stuck < 0) return;
    result.violated = true;
    result.violation = {"P7", "nobody wakes a rank that sleeps: it needs a timeout"};
  } else {
    return;
  }
  path = path_to(static_cast<std::uint32_t>(stuck));
}

void show() {
  Violation found = result.violation;
  mode = Mode::show;
  run();
  result.violation = found;
}

// Returns false if something new was learnt about who uses what: the exploration was for nothing.
bool explore_once() {
  graph = std::make_unique<Graph>();
  facts = uses;
  learnt = false;
  mode = Mode::explore;
  has_before = false;
  path.clear();
  run();
  while (!learnt && !result.violated && !graph->pending.empty()) {
    if (graph->parents.size() > most_states) {
      result.violated = true;
      result.violation = {"bound", "more than " + std::to_string(most_states) + " states"};
      result.states = graph->parents.size();
      return true;
    }
    const Graph::Pending pending = graph->pending.front();
    graph->pending.pop_front();
    path = path_to(pending.state);
    path.push_back(pending.choice);
    state_before = pending.state;
    has_before = true;
    run();
  }
  if (learnt && !result.violated) return false;
  if (!result.violated) check_ends();
  result.states = graph->parents.size();
  result.transitions = graph->edges.size();
  return true;
}

}  // namespace

Result explore(Scenario& of, std::size_t bound) {
  make_fibers();
  scenario = &of;
  most_states = bound;
  result = Result{};
  word_at.fill(kNone);
  words_known = 0;
  uses.fill({});
  weak_words.clear();
  random_bits.seed(1);
  mode = Mode::walk;
  path.clear();
  for (std::size_t i = 0; i < kWalks; ++i) run();
  result = Result{};  // what they found, the exploration finds by a shorter way
  while (!result.violated && !explore_once()) {
  }
  if (result.violated && result.violation.property != "bound") {
    show();
  }
  graph = nullptr;
  return result;
}

void* fresh_memory(std::size_t bytes) {
  memory_used = (memory_used + 63) / 64 * 64;
  char* place = memory + memory_used;
  memory_used += bytes;
  if (memory_used > kMemoryBytes) std::abort();
  std::memset(place, 0, bytes);
  return place;
}

void spawn(int rank, std::function<void()> body) {
  Fiber& fiber = fibers[static_cast<std::size_t>(num_fibers++)];
  fiber.rank = rank;
  fiber.body = std::move(body);
  fiber.state = State::ready;
  fiber.doing = "begins";
  fiber.at = kNone;
}

void store_from_outside(void* word, std::uint32_t value) {
  constexpr Mask kOutside = 1U << 31;
  const WordId id = id_of(word);
  learnt |= (uses[id].writers & kOutside) == 0;
  uses[id].users |= kOutside;
  uses[id].writers |= kOutside;
  write(id, word, sizeof(value), value, 0, {});
}

int self() { return running; }
int rank_of(int thread) { return fibers[static_cast<std::size_t>(thread)].rank; }
int threads() { return num_fibers; }
bool is_halted(int rank) { return (halted >> rank & 1) != 0; }
bool has_died(int rank) { return (dead >> rank & 1) != 0; }
bool is_overdue(int thread) {
  const Fiber& fiber = fibers[static_cast<std::size_t>(thread)];
  return fiber.clocked && fiber.since < epoch;
}
bool is_waiting_for_time(int thread) {
  const Fiber& fiber = fibers[static_cast<std::size_t>(thread)];
  return fiber.clocked && fiber.since == epoch;
}

void forget_all_but(std::uint64_t locals) {
  Fiber& fiber = me();
  fiber.locals = fiber.history = mix(locals, static_cast<std::uint64_t>(running));
  fiber.clocked = false;
  fiber.clock_reads = 0;
  fiber.last_load = kNone;
}

void step(const char* what) { before_access(what, kNone); }

void violate(const std::string& property, const std::string& text) {
  const Outside outside;
  if (!result.violated) {
    result.violated = true;
    result.violation = {property, text};
    path = taken;
  }
  to_main();
}

void owe_wakes(int thread) {
  for (int i = 0; i < num_fibers; ++i) {
    Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (fiber.state != State::asleep || fiber.owed) continue;
    fiber.owed = true;
    fiber.ower = thread;
  }
}

bool owes_wakes(int thread) {
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (!is_out(fiber) && fiber.state == State::asleep && fiber.owed && fiber.ower == thread) {
      return true;
    }
  }
  return false;
}

// ---- Accesses.

std::uint64_t load(const void* place, std::size_t bytes, std::memory_order order) {
  if (running < 0) return raw(place, bytes);
  const WordId id = id_of(place);
  note_use(id, false, order);
  Fiber& fiber = me();
  const bool quiet = is_quiet(id, false);
  const bool weak = is_weak(id) && !quiet;
  // A load that is repeated and finds the same has taken no time.
  const bool again = fiber.last_load == id && (weak || raw(place, bytes) == fiber.last_value);
  if (!quiet && !again) {
    fiber.is_seq_cst = order == std::memory_order_seq_cst;
    before_access("loads", id, weak);
  }
  const std::size_t latest = words[id].older.size();
  std::size_t number = latest;
  if (weak) {
    std::uint8_t& seen = fiber.seen[weak_number[id]];
    if (!again) seen = static_cast<std::uint8_t>(latest - last.age);
    number = seen;
  }
  const std::uint64_t value = value_of(id, number, bytes);
  if (acquires(order)) {
    const Word& word = words[id];
    if (number == latest) {
      acquire(fiber, word.knowledge, word.view);
    } else {
      acquire(fiber, word.older[number].knowledge, word.older[number].view);
    }
  }
  if (again && !quiet) return value;
  fiber.polled = id;
  fiber.polled_value = value;
  fiber.before_poll = fiber.history;
  if (!quiet) {
    fiber.last_load = id;
    fiber.last_value = value;
  }
  remember(fiber, mix(id, is_quiet_word[id] ? value : scenario->significant(place, value)));
  return value;
}

void store(void* place, std::size_t bytes, std::uint64_t value, std::memory_order order) {
  if (running < 0) {
    std::memcpy(place, &value, bytes);
    return;
  }
  const WordId id = id_of(place);
  note_use(id, true, order);
  Fiber& fiber = me();
  if (!is_quiet(id, true)) before_access("stores to", id);
  fiber.last_load = kNone;
  make_store(id, place, bytes, value, order, 0, {});
  remember(fiber, id);
}

std::uint64_t add(void* place, std::size_t bytes, std::uint64_t difference,
                  std::memory_order order) {
  const WordId id = id_of(place);
  note_use(id, true, order);
  Fiber& fiber = me();
  if (!is_quiet(id, true)) before_access("adds to", id);
  fiber.last_load = kNone;
  const std::uint64_t before = raw(place, bytes);
  const Word& word = words[id];
  if (acquires(order)) acquire(fiber, word.knowledge, word.view);
  make_store(id, place, bytes, before + difference, order, word.knowledge, word.view);
  remember(fiber, mix(id, before));
  return before;
}

bool exchange_if(void* place, std::size_t bytes, std::uint64_t& expected, std::uint64_t desired,
                 std::memory_order order) {
  const WordId id = id_of(place);
  note_use(id, true, order);
  Fiber& fiber = me();
  if (!is_quiet(id, true)) before_access("compares and exchanges", id);
  fiber.last_load = kNone;
  const std::uint64_t before = raw(place, bytes);
  const Word& word = words[id];
  if (is_weak(id)) fiber.seen[weak_number[id]] = static_cast<std::uint8_t>(word.older.size());
  if (acquires(order)) acquire(fiber, word.knowledge, word.view);
  const bool done = before == expected;
  if (done) make_store(id, place, bytes, desired, order, word.knowledge, word.view);
  expected = before;
  remember(fiber, mix(id, before));
  return done;
}

void lock(void* place) {
  const WordId id = id_of(place);
  note_use(id, true);
  Fiber& fiber = me();
  before_access("locks", id);
  while (raw(place, 4) != 0) {
    fiber.state = State::locks;
    fiber.waits_on = id;
    fiber.waits_value = raw(place, 4);
    go_on();
  }
  fiber.last_load = kNone;
  acquire(fiber, words[id].knowledge, words[id].view);
  write(id, place, 4, static_cast<std::uint64_t>(running) + 1, words[id].knowledge, words[id].view);
  remember(fiber, id);
}

void unlock(void* place) {
  const WordId id = id_of(place);
  Fiber& fiber = me();
  before_access("unlocks", id);
  fiber.last_load = kNone;
  write(id, place, 4, 0, fiber.knows, fiber.seen);
  remember(fiber, id);
}

namespace {

std::size_t index_of(const void* place) {
  for (std::size_t i = 0; i < plains.size(); ++i) {
    if (plains[i].place == place) return i;
  }
  std::fprintf(stderr, "model: plain memory that the scenario has not named\n");
  std::abort();
}

Knowledge bit(std::size_t index) {
  if (index >= kKnowledgeBits) {
    std::fprintf(stderr, "model: too much plain memory\n");
    std::abort();
  }
  return static_cast<Knowledge>(1) << index;
}
Knowledge write_of(std::size_t place) {
  return bit(place * (1 + static_cast<std::size_t>(num_fibers)));
}
Knowledge read_of(std::size_t place, int thread) {
  return bit(place * (1 + static_cast<std::size_t>(num_fibers)) + 1 +
             static_cast<std::size_t>(thread));
}

void forget(Knowledge accesses) {
  for (std::size_t i = 0; i < words_known; ++i) {
    for (Older& older : words[i].older) older.knowledge &= ~accesses;
    if ((words[i].knowledge & accesses) == 0) continue;
    words[i].knowledge &= ~accesses;
    rehash(i);
  }
  for (int i = 0; i < num_fibers; ++i) {
    Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    fiber.knows &= ~accesses;
  }
}

}  // namespace

void plain(const void* place, const char* property) {
  const Outside outside;
  plains.push_back({});
  plains.back().place = place;
  plains.back().property = property;
}

void plain_read(const void* place) {
  if (running < 0) return;
  const std::size_t i = index_of(place);
  Plain& plain = plains[i];
  if (plain.written && (me().knows & write_of(i)) == 0) {
    violate(plain.property, "a read of " + scenario->name_of(place) + " races with a write");
  }
  forget(read_of(i, running));
  me().knows |= read_of(i, running);
  plain.readers |= 1U << running;
}

void plain_write(void* place) {
  if (running < 0) return;
  const std::size_t i = index_of(place);
  Plain& plain = plains[i];
  if (plain.written && (me().knows & write_of(i)) == 0) {
    violate(plain.property, "two writes to " + scenario->name_of(place) + " race");
  }
  Knowledge before = write_of(i);
  for (int t = 0; t < num_fibers; ++t) {
    before |= read_of(i, t);
    if ((plain.readers >> t & 1) != 0 && (me().knows & read_of(i, t)) == 0) {
      violate(plain.property, "a write to " + scenario->name_of(place) + " races with a read");
    }
  }
  forget(before);
  me().knows |= write_of(i);
  plain.written = true;
  plain.readers = 0;
  plain.content = me().history;
}

}  // namespace model

// ---- What the protocol uses of the machine.

namespace shardcomm {

using namespace model;

// Two readings in one wait are more than the time for spinning apart, and less than a deadline.
Clock::time_point Clock::now() {
  if (running < 0) return Clock::time_point();
  Fiber& fiber = me();
  fiber.last_load = kNone;
  if (!fiber.clocked) {
    fiber.clocked = true;
    fiber.since = epoch;
  }
  remember(fiber, epoch > fiber.since ? 2 : 1);
  const int reads = fiber.clock_reads < 3 ? fiber.clock_reads++ : 3;
  return Clock::time_point(std::chrono::hours(24) * static_cast<int>(epoch) +
                           std::chrono::microseconds(30) * reads);
}

void sleep_while(const Atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::nanoseconds) {
  const WordId id = id_of(&word);
  note_use(id, false);
  before_access("goes to sleep on", id);
  Fiber& fiber = me();
  fiber.last_load = kNone;
  if (raw(&word, 4) == value) {
    fiber.state = State::asleep;
    fiber.waits_on = id;
    fiber.doing = "goes on after its sleep on";
    // Awake, it looks at everything anew.
    fiber.history = mix(mix(fiber.locals, id), value);
    fiber.clock_reads = 3;
    go_on();
  }
  fiber.clock_reads = 3;
  fiber.history = mix(mix(fiber.locals, id), mix(value, 1));
}

std::chrono::microseconds polling_time() { return std::chrono::microseconds(world.spins ? 1 : 0); }

void wake_all(const Atomic<std::uint32_t>& word) noexcept {
  if (running < 0) return;
  const WordId id = id_of(&word);
  before_access("wakes those on", id);
  me().last_load = kNone;
  for (int i = 0; i < num_fibers; ++i) {
    Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (fiber.state == State::asleep && fiber.waits_on == id) {
      fiber.state = State::ready;
      fiber.owed = false;
    }
  }
  remember(me(), id);
}

}  // namespace shardcomm

// In `Board::leave`: waits until what was loaded last has changed.
extern "C" int sched_yield() noexcept {
  using namespace model;
  if (running < 0 || world.spins) return 0;
  Fiber& fiber = me();
  fiber.state = State::polls;
  fiber.waits_on = fiber.polled;
  fiber.waits_value = fiber.polled_value;
  fiber.history = fiber.before_poll;
  fiber.last_load = kNone;
  fiber.doing = "sees a change of";
  fiber.at = fiber.waits_on;
  go_on();
  return 0;
}

unsigned int std::thread::hardware_concurrency() noexcept { return model::world.spins ? 64 : 1; }

// What a run allocates is gone with it, also what its abandoned threads still hold.
void* operator new(std::size_t bytes) {
  if (model::in_memory) {
    model::memory_used = (model::memory_used + 15) / 16 * 16;
    void* place = model::memory + model::memory_used;
    model::memory_used += bytes;
    if (model::memory_used > model::kMemoryBytes) std::abort();
    return place;
  }
  void* place = std::malloc(bytes == 0 ? 1 : bytes);
  if (place == nullptr) throw std::bad_alloc();
  return place;
}
void operator delete(void* place) noexcept {
  const char* at = static_cast<const char*>(place);
  if (at < model::memory || at >= model::memory + model::kMemoryBytes) std::free(place);
}
void operator delete(void* place, std::size_t) noexcept { operator delete(place); }
