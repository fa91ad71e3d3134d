#include "shardcomm/hosts.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/ending.h"
#include "bindings/interrupt.h"
#include "bindings/lock.h"
#include "stream/fork.h"

namespace shardcomm::bindings {
namespace {

// What a Python object does.
class PythonAcross final : public Across {
 public:
  explicit PythonAcross(py::object across) : across_(std::move(across)) {}
  // A forked child has none of the threads that its parent's groups would wait for, and a process
  // that ends lets go of all.
  ~PythonAcross() override {
    const Held held;
    if (is_ending() || forks() != forks_) {
      across_.release();
    } else {
      with_lock([this] { across_ = py::object(); });
    }
  }
  void all_gather(int channel, const void* send, void* recv, std::size_t bytes) override {
    call("all_gather", channel, address(send), address(recv), bytes);
  }
  void all_to_all(int channel, const void* send, void* recv, std::size_t bytes) override {
    call("all_to_all", channel, address(send), address(recv), bytes);
  }
  void broadcast(int channel, void* buffer, std::size_t bytes, int root) override {
    call("broadcast", channel, address(buffer), bytes, root);
  }
  void leave() noexcept override {
    try {
      call("leave");
    } catch (const std::exception&) {  // it has left as far as it can
    }
  }

 private:
  static std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

  template <class... Args>
  void call(const char* method, Args... args) {
    const Held held;
    if (is_ending()) throw std::runtime_error("the interpreter is ending");
    with_lock([&] {
      try {
        across_.attr(method)(args...);
      } catch (py::error_already_set& error) {
        // Without Python's own exception, which only threads with its lock may hold.
        throw std::runtime_error(py::str(error.value()).cast<std::string>());
      }
    });
  }

  py::object across_;
  const int forks_ = forks();
};

}  // namespace

void bind_hosts(py::module_& m) {
  m.def(
      "make_hosts",
      [](const std::shared_ptr<Communicator>& on_host, py::object across, int host, int hosts) {
        auto given = std::make_unique<PythonAcross>(std::move(across));
        const InterruptibleWait scope;
        auto comm = make_hosts(on_host, std::move(given), host, hosts);
        auto* object = comm.get();
        return destroyed_without_lock(
            std::shared_ptr<Communicator>(object, [comm = std::move(comm)](Communicator*) mutable {
              auto owner = std::make_unique<std::shared_ptr<Communicator>>(std::move(comm));
              // At the interpreter's end a collective may still wait for other hosts. Its
              // communicator is left as it is, since its destructor would wait, too.
              if (is_ending() && any_held()) static_cast<void>(owner.release());
            }));
      },
      py::arg("on_host").none(false), py::arg("across"), py::arg("host"), py::arg("hosts"));
}

}  // namespace shardcomm::bindings
