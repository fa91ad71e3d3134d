#include "shardcomm/stream.h"

#include "bindings/bindings.h"
#include "bindings/interrupt.h"

namespace shardcomm::bindings {
namespace {

void wait(const Event& event) {
  while (true) {
    {
      const py::gil_scoped_release release;
      if (event.wait_for(kInterruptInterval)) return;
    }
    check_interrupt();
  }
}

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
    (*function_)();
  }

 private:
  std::shared_ptr<py::function> function_;
};

}  // namespace

void bind_stream(py::module_& m) {
  py::class_<Event>(m, "Event").def("query", &Event::query).def("wait", &wait);

  // Joining the worker takes the interpreter's lock from a callable that still runs there: let go
  // of it first.
  struct JoinWithoutLock {
    void operator()(Stream* stream) const {
      const py::gil_scoped_release release;
      const std::unique_ptr<Stream> owner(stream);
    }
  };
  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream")
      .def(py::init([] { return std::shared_ptr<Stream>(new Stream(), JoinWithoutLock{}); }))
      .def("enqueue", [](Stream& stream,
                         py::function function) { stream.enqueue(Callable(std::move(function))); })
      .def("record", &Stream::record)
      .def("wait", &Stream::wait)
      .def("synchronize", [](Stream& stream) { wait(stream.record()); });
}

}  // namespace shardcomm::bindings
