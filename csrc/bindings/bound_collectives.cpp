// Collectives with their operands, which a step queues again and again: looked up once, and each
// one crossing from Python.
#include <utility>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "bindings/parts.h"
#include "comm/buffer.h"
#include "shardcomm/communicator.h"
#include "shardcomm/stream.h"
#include "stream/events_around.h"

namespace shardcomm::bindings {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Puts `collective` on `stream`, after all that `after` was given so far. The event of its end.
template <class Collective>
std::shared_ptr<Event> queue(Stream& stream, Stream* after, Collective collective) {
  const InterruptibleWait scope;
  EventsAround events(after != nullptr ? after->record() : nullptr);
  if (events.before != nullptr) stream.wait(events.before);
  stream.enqueue(std::move(collective));
  return events.after != nullptr ? std::move(events.after) : stream.record();
}

struct BoundGather {
  std::shared_ptr<Communicator> comm;
  const void* send;
  DType send_dtype;
  void* recv;
  DType recv_dtype;
  Parts parts;
  std::int64_t tag;

  std::shared_ptr<Event> queue(Stream& stream, Stream* after) const {
    return bindings::queue(stream, after, [bound = *this](NativeStream native) {
      bound.comm->all_gather(bound.send, bound.send_dtype, bound.recv, bound.recv_dtype,
                             bound.parts, bound.tag, native);
    });
  }
};

// What it is reduced into may be elsewhere each time.
struct BoundReduce {
  std::shared_ptr<Communicator> comm;
  const void* send;
  DType dtype;
  DType recv_dtype;
  Parts parts;
  RedOp op;
  std::int64_t tag;

  std::shared_ptr<Event> queue(Stream& stream, Stream* after, std::uintptr_t recv, float scale,
                               bool accumulate, std::uintptr_t nonfinite) const {
    check_reduce_scatter(send, dtype, pointer(recv), recv_dtype, parts, comm->rank(), comm->size());
    const Epilogue epilogue{recv_dtype, scale, accumulate,
                            static_cast<std::int32_t*>(pointer(nonfinite))};
    return bindings::queue(stream, after,
                           [bound = *this, to = pointer(recv), epilogue](NativeStream native) {
                             bound.comm->reduce_scatter(bound.send, bound.dtype, to, epilogue,
                                                        bound.parts, bound.op, bound.tag, native);
                           });
  }
};

}  // namespace

void bind_bound_collectives(py::module_& m) {
  using Comm = std::shared_ptr<Communicator>;
  py::class_<BoundGather>(m, "BoundGather")
      .def(py::init([](Comm comm, std::uintptr_t send, DType send_dtype, std::uintptr_t recv,
                       DType recv_dtype, const Parts& parts, std::int64_t tag) {
             check_all_gather(pointer(send), send_dtype, pointer(recv), recv_dtype, parts,
                              comm->rank(), comm->size());
             return BoundGather{std::move(comm), pointer(send), send_dtype, pointer(recv),
                                recv_dtype,      parts,         tag};
           }),
           py::arg("comm"), py::arg("send"), py::arg("send_dtype"), py::arg("recv"),
           py::arg("recv_dtype"), py::arg("parts"), py::arg("tag"))
      .def("queue", &BoundGather::queue, py::arg("stream"), py::arg("after"));
  py::class_<BoundReduce>(m, "BoundReduce")
      .def(py::init([](Comm comm, std::uintptr_t send, DType dtype, DType recv_dtype,
                       const Parts& parts, RedOp op, std::int64_t tag) {
             return BoundReduce{std::move(comm), pointer(send), dtype, recv_dtype, parts, op, tag};
           }),
           py::arg("comm"), py::arg("send"), py::arg("dtype"), py::arg("recv_dtype"),
           py::arg("parts"), py::arg("op"), py::arg("tag"))
      .def("queue", &BoundReduce::queue, py::arg("stream"), py::arg("after"), py::arg("recv"),
           py::arg("scale"), py::arg("accumulate"), py::arg("nonfinite"));
}

}  // namespace shardcomm::bindings
