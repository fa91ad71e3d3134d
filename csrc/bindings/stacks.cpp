// What shardcomm/process/stack_dumps.py needs of signals, and Python does not have: faulthandler's
// handler with something after it. Its own `chain` does that, but has system calls return EINTR.
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "bindings/bindings.h"

namespace shardcomm::bindings {
namespace {

constexpr char kEnd[] = "end of stacks\n";

using Handler = void (*)(int);
struct Handlers {
  Handler dump = nullptr;
  Handler then = nullptr;
};
std::array<Handlers, NSIG> handlers;
int end_fd = -1;

void write_end(int) { (void)!write(end_fd, kEnd, sizeof(kEnd) - 1); }

void dump_then(int signal) {
  const int error = errno;
  const Handlers& both = handlers[static_cast<std::size_t>(signal)];
  both.dump(signal);
  both.then(signal);
  errno = error;
}

struct sigaction action_of(int signal) {
  struct sigaction action{};
  if (sigaction(signal, nullptr, &action) != 0) throw py::value_error(std::strerror(errno));
  return action;
}

void handle(int signal, Handler handler) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigfillset(&action.sa_mask);  // one dump at a time
  if (sigaction(signal, &action, nullptr) != 0) throw py::value_error(std::strerror(errno));
}

}  // namespace

void bind_stacks(py::module_& m) {
  m.attr("end_of_stacks") = py::bytes(kEnd);
  // Also those that Python does not know of.
  m.def(
      "has_handler",
      [](int signal) {
        const struct sigaction action = action_of(signal);
        return (action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL;
      },
      py::arg("signal"));
  // `register_dump` makes faulthandler's the handler of `signal`. Afterwards comes the handler that
  // was there before; or, with `fd`, `end_of_stacks` is written there.
  m.def(
      "dump_then",
      [](int signal, const py::function& register_dump, int fd) {
        if (fd >= 0) {
          end_fd = fd;
          handle(signal, &write_end);  // faulthandler leaves it in its place when Python ends
        }
        Handlers& both = handlers[static_cast<std::size_t>(signal)];
        both.then = action_of(signal).sa_handler;
        register_dump();
        both.dump = action_of(signal).sa_handler;
        handle(signal, &dump_then);
      },
      py::arg("signal"), py::arg("register_dump"), py::arg("fd") = -1);
}

}  // namespace shardcomm::bindings
