#include "stream/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#include <limits>

namespace shardcomm {
namespace {

// Not FUTEX_PRIVATE_FLAG: the word may be shared between processes.
void futex(const Atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  static_assert(sizeof(word) == sizeof(std::uint32_t) &&
                Atomic<std::uint32_t>::is_always_lock_free);
  syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

std::chrono::microseconds polling_time() { return std::chrono::microseconds(200); }

void sleep_while(const Atomic<std::uint32_t>& word, std::uint32_t value,
                 std::chrono::nanoseconds timeout) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec bound{seconds.count(), (timeout - seconds).count()};
  futex(word, FUTEX_WAIT, value, &bound);
}

void wake_all(const Atomic<std::uint32_t>& word) noexcept {
  futex(word, FUTEX_WAKE, static_cast<std::uint32_t>(std::numeric_limits<int>::max()), nullptr);
}

}  // namespace shardcomm
