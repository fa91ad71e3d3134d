// The present run of a scenario: its threads, the words they share, and what has been chosen.
//
// There is one run at a time, so its parts are variables: fibers.cpp switches between the threads,
// words.cpp and plain.cpp make their accesses, choices.cpp lists what may happen next, state.cpp
// sums up where the run is, and explorer.cpp chooses.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "explorer.h"
#include "stream/futex.h"

namespace model {

// What one knows of accesses to plain memory: a bit for the latest write to each place, and one
// for each thread's latest read of it. An acquire learns what the release that it reads from knew.
__extension__ typedef unsigned __int128 Knowledge;
constexpr int kKnowledgeBits = 128;

constexpr std::size_t kMemoryBytes = std::size_t{1} << 22;
constexpr std::size_t kMostWords = 2048;

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

inline Code pack(Choice choice) {
  return static_cast<Code>(static_cast<unsigned>(choice.kind) << 10 | choice.age << 5U |
                           choice.who);
}
inline Choice unpack(Code code) {
  return {static_cast<Kind>(code >> 10), static_cast<std::uint8_t>(code & 31),
          static_cast<std::uint8_t>(code >> 5 & 31)};
}

enum class State : std::uint8_t { ready, asleep, polls, locks, over };

// Of each weak word the oldest store that one may still read: the stores to it are numbered. As
// knowledge is, it is released and acquired.
constexpr std::size_t kMostWeak = 32;
using View = std::array<std::uint8_t, kMostWeak>;

inline void join(View& into, const View& other) {
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

enum class Mode : std::uint8_t {
  walk,     // by chance: only to learn who uses what
  explore,  // every state
  show      // the path to a violation
};

// ---- Memory.

extern char memory[kMemoryBytes];
extern std::size_t memory_used;
extern bool in_memory;  // whether `operator new` takes from it
extern std::size_t words_known;
extern std::array<const void*, kMostWords> place_of;
extern std::array<bool, kMostWords> is_quiet_word;        // as the scenario says
extern std::array<std::uint8_t, kMostWords> weak_number;  // of a weak word, in views
extern std::vector<WordId> weak_words;
extern std::array<Word, kMostWords> words;
extern std::array<Use, kMostWords> uses;   // as learnt so far
extern std::array<Use, kMostWords> facts;  // as learnt before this exploration
extern std::uint64_t memory_hash;
extern std::vector<Plain> plains;

// ---- Threads, and the world around them.

extern std::array<Fiber, kMostThreads> fibers;
extern int num_fibers;
extern int running;  // -1: none, and accesses are plain
extern std::uint64_t epoch;
extern Mask halted;
extern Mask dead;
extern Mask shown;
extern int faults_left;
extern Scenario* scenario;
extern World world;

// ---- Choices.

extern Mode mode;
extern Choice last;
extern bool learnt;  // something new of who uses what

inline Fiber& me() { return fibers[static_cast<std::size_t>(running)]; }
inline bool is_out(const Fiber& fiber) { return (halted >> fiber.rank & 1) != 0; }

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

// What is in memory.
inline std::uint64_t raw(const void* place, std::size_t bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, place, bytes);
  return value;
}

inline std::uint64_t hash_of(const Knowledge& knowledge) {
  return mix(static_cast<std::uint64_t>(knowledge), static_cast<std::uint64_t>(knowledge >> 64));
}

// fibers.cpp
void make_fibers();
void forget_fibers();  // of the last run, and what it allocated
// Calls `body`; returns when some fiber has called `to_main`.
void leave_main(void (*body)());
[[noreturn]] void to_main();
void switch_to(int thread);

// words.cpp
void forget_words();   // of the last run
void forget_places();  // of the last scenario
WordId id_of(const void* place);
void rehash(std::size_t id);
void write(WordId id, void* place, std::size_t bytes, std::uint64_t value, Knowledge knowledge,
           const View& view);
// Whether loads of the word may read older stores.
bool is_weak(WordId id);
// What the store of this number to a weak word has written.
std::uint64_t value_of(WordId id, std::size_t number, std::size_t bytes);
void note_use(WordId id, bool writes, std::memory_order order = std::memory_order_seq_cst);
// Before an access: others may go first.
void before_access(const char* doing, WordId id, bool reads_weak = false);
inline void remember(Fiber& fiber, std::uint64_t what) { fiber.history = mix(fiber.history, what); }

// choices.cpp: all that may happen now; returns how many.
using Options = std::array<Code, kMostThreads*(kMostAges + 4) + kMostRanks>;
std::size_t list(Options& out);
bool all_over();

// state.cpp
std::uint64_t state_hash();

// explorer.cpp: goes on with the run, until this fiber is to go on, if one calls it.
void go_on();

}  // namespace model
