#include "shardcomm/stream.h"

#include "bindings/bindings.h"
#include "bindings/interrupt.h"

namespace shardcomm::bindings {
namespace {

void wait(const Event& event) {
  const InterruptibleWait scope;
  event.wait();
}

// What a callable raised. Everybody who waits for the stream raises it again; pybind11's own
// exception can be raised once.
class Raised : public std::exception {
 public:
  explicit Raised(const py::error_already_set& error)
      : value_(new py::object(error.value()), [](py::object* held) {
          const py::gil_scoped_acquire acquire;
          const std::unique_ptr<py::object> owner(held);
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
  explicit Callable(py::function function)
      : function_(new py::function(std::move(function)), [](py::function* held) {
          const py::gil_scoped_acquire acquire;
          const std::unique_ptr<py::function> owner(held);
        }) {}

  void operator()() const {
    const py::gil_scoped_acquire acquire;
    try {
      (*function_)();
    } catch (const py::error_already_set& error) {
      throw Raised(error);
    }
  }

 private:
  std::shared_ptr<py::function> function_;
};

}  // namespace

void bind_stream(py::module_& m) {
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

  // Joining the worker takes the interpreter's lock from a callable that still runs there.
  const auto shared = [](std::unique_ptr<Stream> stream) {
    return destroyed_without_lock(std::shared_ptr<Stream>(std::move(stream)));
  };
  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream")
      .def(py::init([shared] { return shared(make_thread_stream()); }))
      .def_static("caller", [shared] { return shared(make_caller_stream()); })
      .def_static(
          "cuda", [shared](int device) { return shared(make_cuda_stream(device)); },
          py::arg("device"))
      .def_static(
          "from_cuda",
          [shared](int device, std::uintptr_t handle) {
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
          py::arg("dst"), py::arg("src"), py::arg("nbytes"),
          py::call_guard<py::gil_scoped_release>())
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
