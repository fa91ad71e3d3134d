// Collectives with their operands, which a step runs again and again: looked up once, and each one
// crossing from Python.
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "bindings/optional_stream.h"
#include "bindings/parts.h"
#include "shardcomm/coding.h"
#include "shardcomm/communicator.h"
#include "shardcomm/stream.h"
#include "stream/events_around.h"

namespace shardcomm::bindings {
namespace {

// Puts `collective` on `stream`, after all that `after` was given so far. The event of its end.
std::shared_ptr<Event> queue(Stream& stream, OptionalStream after, Stream::Operation collective) {
  const InterruptibleWait scope;
  EventsAround events(after.has_value() ? (*after)->record() : nullptr);
  if (events.before != nullptr) stream.wait(events.before);
  stream.enqueue(std::move(collective));
  return events.after != nullptr ? std::move(events.after) : stream.record();
}

struct BoundCollective {
  Stream::Operation collective;

  void run() const {
    const InterruptibleWait scope;
    collective(nullptr);
  }

  void enqueue(Stream& stream) const {
    const InterruptibleWait scope;
    stream.enqueue(collective);
  }

  // For benchmarks: what remains of a call without the way here.
  void repeat(int times) const {
    const InterruptibleWait scope;
    for (int i = 0; i < times; ++i) collective(nullptr);
  }

  std::shared_ptr<Event> queue(Stream& stream, OptionalStream after) const {
    return bindings::queue(stream, after, collective);
  }
};

// A reduce-scatter of which only what it sends is bound: the result goes elsewhere each time.
struct BoundReduction {
  std::shared_ptr<Communicator> comm;
  const void* send;
  DType dtype;
  DType recv_dtype;
  Parts parts;
  RedOp op;
  std::int64_t tag;
  std::optional<Coding> coding;

  std::shared_ptr<Event> queue(Stream& stream, OptionalStream after, std::uintptr_t recv,
                               float scale, bool accumulate, std::uintptr_t nonfinite) const {
    const Epilogue epilogue = epilogue_of(recv_dtype, scale, accumulate, nonfinite);
    return bindings::queue(stream, after,
                           Communicator::bind_reduce_scatter(comm, send, dtype, pointer(recv),
                                                             epilogue, parts, op, tag, coding));
  }
};

}  // namespace

void bind_bound_collectives(py::module_& m) {
  using Comm = std::shared_ptr<Communicator>;
  py::class_<BoundCollective>(m, "BoundCollective")
      .def_static(
          "all_gather",
          [](Comm comm, std::uintptr_t send, DType send_dtype, std::uintptr_t recv,
             DType recv_dtype, const Parts& parts, std::int64_t tag) {
            return BoundCollective{Communicator::bind_all_gather(
                std::move(comm), pointer(send), send_dtype, pointer(recv), recv_dtype, parts, tag)};
          },
          py::arg("comm"), py::arg("send"), py::arg("send_dtype"), py::arg("recv"),
          py::arg("recv_dtype"), py::arg("parts"), py::arg("tag"))
      .def_static(
          "reduce_scatter",
          [](Comm comm, std::uintptr_t send, DType dtype, std::uintptr_t recv, DType recv_dtype,
             float scale, bool accumulate, const Parts& parts, RedOp op, std::int64_t tag,
             std::uintptr_t nonfinite) {
            const Epilogue epilogue = epilogue_of(recv_dtype, scale, accumulate, nonfinite);
            return BoundCollective{Communicator::bind_reduce_scatter(
                std::move(comm), pointer(send), dtype, pointer(recv), epilogue, parts, op, tag)};
          },
          py::arg("comm"), py::arg("send"), py::arg("dtype"), py::arg("recv"),
          py::arg("recv_dtype"), py::arg("scale"), py::arg("accumulate"), py::arg("parts"),
          py::arg("op"), py::arg("tag"), py::arg("nonfinite"))
      .def_static(
          "all_reduce",
          [](Comm comm, std::uintptr_t buffer, DType dtype, std::int64_t count, RedOp op,
             std::int64_t tag) {
            return BoundCollective{Communicator::bind_all_reduce(std::move(comm), pointer(buffer),
                                                                 dtype, count, op, tag)};
          },
          py::arg("comm"), py::arg("buffer"), py::arg("dtype"), py::arg("count"), py::arg("op"),
          py::arg("tag"))
      .def_static(
          "broadcast",
          [](Comm comm, std::uintptr_t buffer, DType dtype, std::int64_t count, int root) {
            return BoundCollective{
                Communicator::bind_broadcast(std::move(comm), pointer(buffer), dtype, count, root)};
          },
          py::arg("comm"), py::arg("buffer"), py::arg("dtype"), py::arg("count"), py::arg("root"))
      .def_static(
          "barrier",
          [](Comm comm, std::int64_t tag) {
            return BoundCollective{Communicator::bind_barrier(std::move(comm), tag)};
          },
          py::arg("comm"), py::arg("tag"))
      .def_static(
          "sharing",
          [](Comm comm, std::uintptr_t buffer, std::size_t nbytes, std::int64_t tag) {
            return BoundCollective{
                Communicator::bind_sharing(std::move(comm), pointer(buffer), nbytes, tag)};
          },
          py::arg("comm"), py::arg("buffer"), py::arg("nbytes"), py::arg("tag"))
      .def("__call__", &BoundCollective::run)
      .def("enqueue", &BoundCollective::enqueue, py::arg("stream"))
      .def("queue", &BoundCollective::queue, py::arg("stream"), py::arg("after"))
      .def("repeat", &BoundCollective::repeat, py::arg("times"));
  py::class_<Coding>(m, "Coding")
      .def(py::init([](std::optional<BlockFormat> blocks, std::uintptr_t stats) {
             return Coding{blocks, static_cast<BlockStats*>(pointer(stats))};
           }),
           py::arg("blocks"), py::arg("stats"));
  py::class_<BoundReduction>(m, "BoundReduction")
      .def(py::init([](Comm comm, std::uintptr_t send, DType dtype, DType recv_dtype,
                       const Parts& parts, RedOp op, std::int64_t tag,
                       std::optional<Coding> coding) {
             return BoundReduction{
                 std::move(comm), pointer(send), dtype, recv_dtype, parts, op, tag, coding};
           }),
           py::arg("comm"), py::arg("send"), py::arg("dtype"), py::arg("recv_dtype"),
           py::arg("parts"), py::arg("op"), py::arg("tag"), py::arg("coding"))
      .def("queue", &BoundReduction::queue, py::arg("stream"), py::arg("after"), py::arg("recv"),
           py::arg("scale"), py::arg("accumulate"), py::arg("nonfinite"));
}

}  // namespace shardcomm::bindings
