// The threads of a run, which are fibers of one thread, and the memory that a run allocates.
#include <cxxabi.h>

#include <cstdlib>
#include <new>

#include "run.h"

namespace model {

alignas(4096) char memory[kMemoryBytes];
std::size_t memory_used = 0;
bool in_memory = false;
std::array<Fiber, kMostThreads> fibers;
int num_fibers = 0;
int running = -1;

namespace {

constexpr std::size_t kStackBytes = std::size_t{1} << 18;
jmp_buf main_here;
ucontext_t main_context;

struct EhGlobals {
  void* caught;
  unsigned uncaught;
};

EhGlobals& eh_globals() { return *reinterpret_cast<EhGlobals*>(abi::__cxa_get_globals()); }

void save(Fiber& fiber) {
  fiber.caught = eh_globals().caught;
  fiber.uncaught = eh_globals().uncaught;
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

// Has no loop of its own: to gcc getcontext may return twice, and a loop's counter be lost.
void make_fiber(int thread) {
  Fiber& fiber = fibers[static_cast<std::size_t>(thread)];
  if (fiber.stack) return;
  fiber.stack = std::make_unique<char[]>(kStackBytes);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, reinterpret_cast<void (*)()>(fiber_main), 1, thread);
  swapcontext(&main_context, &fiber.context);
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

}  // namespace

void to_main() {
  if (running >= 0) save(fibers[static_cast<std::size_t>(running)]);
  eh_globals() = {nullptr, 0};
  running = -1;
  in_memory = false;
  _longjmp(main_here, 1);
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

void make_fibers() {
  for (int i = 0; i < kMostThreads; ++i) make_fiber(i);
}

void forget_fibers() {
  for (int i = 0; i < num_fibers; ++i) forget_fiber(fibers[static_cast<std::size_t>(i)]);
  num_fibers = 0;
  running = -1;
  memory_used = 0;
}

void leave_main(void (*body)()) {
  if (_setjmp(main_here) == 0) body();
  in_memory = false;
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

}  // namespace model

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
