#include "shardcomm/stream.h"

#include <unistd.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "stream/fork.h"
#include "stream/futex.h"

namespace shardcomm::bindings {
namespace {

void wait(const Event& event) {
  const InterruptibleWait scope;
  event.wait();
}

// The Python callables that streams hold: not run yet, or not let go of. While any is left, the
// interpreter does not end (`finish_callables`).
Atomic<std::uint32_t> held{0};
Atomic<std::uint32_t> ending{0};
thread_local bool in_callable = false;

// What a callable raised. Everybody who waits for the stream raises it again; pybind11's own
// exception can be raised once.
class Raised : public std::exception {
 public:
  explicit Raised(const py::error_already_set& error)
      : value_(new py::object(error.value()), [](py::object* value) {
          if (ending.load() != 0) return;  // the interpreter may be gone; the process soon is
          with_lock([value] { const std::unique_ptr<py::object> owner(value); });
        }) {}
  const char* what() const noexcept override { return "a Python exception"; }
  void raise() const {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value_->ptr())), value_->ptr());
  }

 private:
  std::shared_ptr<py::object> value_;
};

// A Python callable that another thread runs, and lets go of, under the interpreter's lock.
class Callable {
 public:
  explicit Callable(py::function function) {
    if (ending.load() != 0 && !in_callable) {
      throw std::runtime_error(
          "enqueue: the interpreter is ending, and streams take no more Python callables");
    }
    function_ = {new py::function(std::move(function)), [made_at = forks()](py::function* owned) {
                   with_lock([owned] { const std::unique_ptr<py::function> owner(owned); });
                   if (made_at != forks()) return;  // counted in the parent
                   held.fetch_sub(1);
                   if (ending.load() != 0) wake_all(held);
                 }};
    held.fetch_add(1);
  }

  void operator()() const {
    with_lock([this] {
      const int made_at = forks();
      const bool before = std::exchange(in_callable, true);
      std::optional<Raised> raised;
      try {
        (*function_)();
      } catch (py::error_already_set& error) {
        if (forks() == made_at) {
          raised.emplace(error);
        } else {
          error.discard_as_unraisable("a stream's callable that has forked, in the child");
        }
      }
      // It goes on in a child that it forked, too, as the only thread there. As one of Python's
      // would, that ends with it.
      if (forks() != made_at) _exit(0);
      in_callable = before;
      if (raised) throw Raised(*raised);
    });
  }

 private:
  std::shared_ptr<py::function> function_;
};

// At the interpreter's exit: no thread of a stream may come for it afterwards.
void finish_callables() {
  constexpr std::chrono::seconds kSilent{1};
  ending.store(1);
  try {
    const InterruptibleWait scope;
    const Clock::time_point begin = Clock::now();
    bool said = false;
    while (const std::uint32_t left = held.load()) {
      sleep_while(held, left, kWaitSlice);
      check_wait();
      if (said || Clock::now() - begin < kSilent) continue;
      said = true;
      with_lock([left] {
        PySys_WriteStderr(
            "shardcomm: this process ends when its streams have run what they were given; Python "
            "callables left: %d (Ctrl-C drops them)\n",
            static_cast<int>(left));
      });
    }
  } catch (const Interrupted&) {
    PySys_WriteStderr("shardcomm: Python callables of streams that are dropped: %d\n",
                      static_cast<int>(held.load()));
  }
}

// Without the lock, which what still runs there may want. A stream whose callable does not end is
// not waited for a second time.
std::shared_ptr<Stream> shared(std::unique_ptr<Stream> stream) {
  return destroyed_without_lock(std::shared_ptr<Stream>(stream.release(), [](Stream* let_go) {
    std::unique_ptr<Stream> owner(let_go);
    if (ending.load() != 0 && held.load() != 0) static_cast<void>(owner.release());
  }));
}

}  // namespace

void bind_stream(py::module_& m) {
  at_fork(nullptr, nullptr, [] { held.store(0); });
  py::module_::import("atexit").attr("register")(py::cpp_function(&finish_callables));
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Raised& raised) {
      raised.raise();
    }
  });
  py::class_<Event, std::shared_ptr<Event>>(m, "Event")
      .def("query", &Event::query)
      .def("wait", &wait)
      .def("seconds_since", &Event::seconds_since, py::arg("earlier"));

  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream")
      .def(py::init([] { return shared(make_thread_stream()); }))
      .def_static("caller", [] { return shared(make_caller_stream()); })
      .def_static(
          "cuda", [](int device) { return shared(make_cuda_stream(device)); }, py::arg("device"))
      .def_static(
          "from_cuda",
          [](int device, std::uintptr_t handle) {
            return shared(borrow_cuda_stream(device, reinterpret_cast<NativeStream>(handle)));
          },
          py::arg("device"), py::arg("handle"))
      .def_property_readonly(
          "handle",
          [](const Stream& stream) { return reinterpret_cast<std::uintptr_t>(stream.native()); })
      .def("enqueue",
           [](Stream& stream, py::function function) {
             stream.enqueue(
                 [callable = Callable(std::move(function))](NativeStream) { callable(); });
           })
      .def(
          "copy",
          [](Stream& stream, std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes) {
            stream.copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes);
          },
          py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::call_guard<WithoutLock>())
      .def_property_readonly("capturing", &Stream::capturing)
      .def("record", &Stream::record, py::arg("timed") = false)
      .def(
          "wait",
          [](Stream& stream, std::shared_ptr<Event> event) {
            const InterruptibleWait scope;
            stream.wait(std::move(event));
          },
          py::arg("event").none(false))
      .def("synchronize", [](Stream& stream) { wait(*stream.record()); });
}

}  // namespace shardcomm::bindings
