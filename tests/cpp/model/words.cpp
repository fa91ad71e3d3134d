// What threads do to the words they share, as C++'s memory model has it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "run.h"

namespace model {

std::size_t words_known = 0;
std::array<const void*, kMostWords> place_of;
std::array<bool, kMostWords> is_quiet_word;
std::array<std::uint8_t, kMostWords> weak_number;
std::vector<WordId> weak_words;
std::array<Word, kMostWords> words;
std::array<Use, kMostWords> uses;
std::array<Use, kMostWords> facts;
std::uint64_t memory_hash = 0;

namespace {

std::array<WordId, kMemoryBytes / 4> word_at;

// A release sequence goes on through read-modify-writes, and ends at any other store.
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}

bool acquires(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_release;
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

}  // namespace

void forget_words() {
  memory_hash = 0;
  std::fill_n(words.begin(), words_known, Word{});
}

void forget_places() {
  word_at.fill(kNone);
  words_known = 0;
  uses.fill({});
  weak_words.clear();
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

bool is_weak(WordId id) {
  return world.weak && mode != Mode::walk && facts[id].is_weak && !is_quiet_word[id];
}

// What the store of this number to a weak word has written.
std::uint64_t value_of(WordId id, std::size_t number, std::size_t bytes) {
  const Word& word = words[id];
  return number < word.older.size() ? word.older[number].value : raw(place_of[id], bytes);
}

void note_use(WordId id, bool writes, std::memory_order order) {
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

// Before an access: others may go first.
void before_access(const char* doing, WordId id, bool reads_weak) {
  Fiber& fiber = me();
  fiber.doing = doing;
  fiber.at = id;
  fiber.reads_weak = reads_weak;
  fiber.state = State::ready;
  go_on();
}

void store_from_outside(void* word, std::uint32_t value) {
  constexpr Mask kOutside = 1U << 31;
  const WordId id = id_of(word);
  learnt |= (uses[id].writers & kOutside) == 0;
  uses[id].users |= kOutside;
  uses[id].writers |= kOutside;
  write(id, word, sizeof(value), value, 0, {});
}

void forget_all_but(std::uint64_t locals) {
  Fiber& fiber = me();
  fiber.locals = fiber.history = mix(locals, static_cast<std::uint64_t>(running));
  fiber.clocked = false;
  fiber.clock_reads = 0;
  fiber.last_load = kNone;
}

void step(const char* what) { before_access(what, kNone); }

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

}  // namespace model
