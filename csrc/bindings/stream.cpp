#include "shardcomm/stream.h"

#include <unistd.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/ending.h"
#include "bindings/interrupt.h"
#include "stream/fork.h"

namespace shardcomm::bindings {
namespace {

void wait(const Event& event) {
  const InterruptibleWait scope;
  event.wait();
}

thread_local bool in_callable = false;

// What a callable raised. Everybody who waits for the stream raises it again; pybind11's own
// exception can be raised once.
class Raised : public std::exception {
 public:
  explicit Raised(const py::error_already_set& error)
      : value_(new py::object(error.value()), [](py::object* value) {
          if (is_ending()) return;  // the interpreter may be gone; the process soon is
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
    auto held = std::make_shared<Held>();  // until it has run, and was let go of
    if (is_ending() && !in_callable) {
      throw std::runtime_error(
          "enqueue: the interpreter is ending, and streams take no more Python callables");
    }
    function_ = {new py::function(std::move(function)),
                 [held = std::move(held)](py::function* owned) mutable {
                   with_lock([owned] { const std::unique_ptr<py::function> owner(owned); });
                   held = nullptr;
                 }};
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

// Without the lock, which what still runs there may want. A stream whose callable does not end is
// not waited for a second time.
std::shared_ptr<Stream> shared(std::unique_ptr<Stream> stream) {
  return destroyed_without_lock(std::shared_ptr<Stream>(stream.release(), [](Stream* let_go) {
    std::unique_ptr<Stream> owner(let_go);
    if (is_ending() && any_held()) static_cast<void>(owner.release());
  }));
}

}  // namespace

void bind_stream(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Raised& raised) {
      raised.raise();
    }
  });
  py::class_<Event, std::shared_ptr<Event>>(
      m, "Event",
      "A point in a stream's work. It fires when all work before that point has finished, or has "
      "failed.\n\n`Stream.record` makes it.")
      .def("query", &Event::query, "Whether the event has fired. It never blocks and never raises.")
      .def("wait", &wait, "Blocks the host until the event has fired. Ctrl-C ends the wait.")
      .def("seconds_since", &Event::seconds_since, py::arg("earlier"),
           "The seconds from `earlier` to this event.");

  py::class_<Stream, std::shared_ptr<Stream>>(
      m, "Stream",
      "Runs the work that it is given, in order: collectives, copies and Python callables.\n\n"
      "`Stream()` is a worker thread of this process, for communication on a CPU. `Stream.cuda` "
      "and\n`Stream.from_cuda` are streams of a GPU. `Stream.caller` runs everything at once in "
      "the calling thread.")
      .def(py::init([] { return shared(make_thread_stream()); }),
           "Starts a worker thread, which ends with this object, after the work that was queued.")
      .def_static(
          "caller", [] { return shared(make_caller_stream()); },
          "A stream whose work runs at once, in the thread that queues it, and whose events have "
          "fired.")
      .def_static(
          "cuda", [](int device) { return shared(make_cuda_stream(device)); }, py::arg("device"),
          "A new stream of a GPU, which does not synchronise with the default stream.")
      .def_static(
          "from_cuda",
          [](int device, std::uintptr_t handle) {
            return shared(borrow_cuda_stream(device, reinterpret_cast<NativeStream>(handle)));
          },
          py::arg("device"), py::arg("handle"),
          "A CUDA stream that belongs to somebody else, and must live longer than this object.")
      .def_property_readonly(
          "handle",
          [](const Stream& stream) { return reinterpret_cast<std::uintptr_t>(stream.native()); },
          "The cudaStream_t; 0 on a CPU.")
      .def(
          "enqueue",
          [](Stream& stream, py::function function) {
            stream.enqueue(
                [callable = Callable(std::move(function))](NativeStream) { callable(); });
          },
          py::arg("function"), "Runs a callable after all earlier work.")
      .def(
          "copy",
          [](Stream& stream, std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes) {
            stream.copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes);
          },
          py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::call_guard<WithoutLock>(),
          "Copies memory after all earlier work. Both ends must stay valid until the copy is done.")
      .def_property_readonly(
          "capturing", &Stream::capturing,
          "Whether the stream is being captured in a CUDA graph, so that nothing runs now.")
      .def("record", &Stream::record, py::arg("timed") = false,
           "An event at this point of the stream.")
      .def(
          "wait",
          [](Stream& stream, std::shared_ptr<Event> event) {
            const InterruptibleWait scope;
            stream.wait(std::move(event));
          },
          py::arg("event").none(false),
          "Makes later work of this stream start after `event`. Only `caller()` blocks for that.")
      .def(
          "synchronize", [](Stream& stream) { wait(*stream.record()); },
          "Blocks the host until all work that was queued has finished; raises what that work has "
          "raised.");
}

}  // namespace shardcomm::bindings
