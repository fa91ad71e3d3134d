#include "bindings/bindings.h"
#include "copy/bound_copy.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm::bindings {
namespace {

std::vector<const void*> const_pointers(const std::vector<std::uintptr_t>& addresses) {
  std::vector<const void*> pointers;
  pointers.reserve(addresses.size());
  for (const std::uintptr_t a : addresses) pointers.push_back(reinterpret_cast<const void*>(a));
  return pointers;
}

std::vector<void*> pointers(const std::vector<std::uintptr_t>& addresses) {
  std::vector<void*> result;
  result.reserve(addresses.size());
  for (const std::uintptr_t a : addresses) result.push_back(reinterpret_cast<void*>(a));
  return result;
}

using SegmentTuple = std::tuple<std::int32_t, std::int64_t, std::int64_t, std::int32_t,
                                std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

std::vector<Segment> segments(const std::vector<SegmentTuple>& tuples) {
  std::vector<Segment> result;
  result.reserve(tuples.size());
  for (const auto& [src, src_offset, src_pitch, dst, dst_offset, dst_pitch, rows, cols] : tuples) {
    result.push_back({src, dst, src_offset, src_pitch, dst_offset, dst_pitch, rows, cols});
  }
  return result;
}

}  // namespace

void bind_copy(py::module_& m) {
  py::class_<CopyPlan, std::shared_ptr<CopyPlan>>(m, "CopyPlan")
      .def(py::init([](const std::vector<SegmentTuple>& tuples, DType src_dtype, DType dst_dtype) {
             return std::make_shared<CopyPlan>(segments(tuples), src_dtype, dst_dtype);
           }),
           py::arg("segments"), py::arg("src_dtype"), py::arg("dst_dtype"))
      .def_property_readonly("num_sources", &CopyPlan::num_sources)
      .def_property_readonly("num_destinations", &CopyPlan::num_destinations)
      .def_property_readonly("elements", &CopyPlan::elements)
      .def_property_readonly("num_tiles", [](const CopyPlan& plan) { return plan.tiles().size(); });

  py::class_<BoundCopy, std::shared_ptr<BoundCopy>>(m, "BoundCopy")
      .def(py::init([](std::shared_ptr<CopyPlan> plan,
                       const std::vector<std::uintptr_t>& destinations, float scale,
                       bool accumulate, int threads) {
             return std::make_shared<BoundCopy>(std::move(plan), pointers(destinations),
                                                CopyOptions{scale, accumulate, threads});
           }),
           py::arg("plan"), py::arg("destinations"), py::arg("scale") = 1.0f,
           py::arg("accumulate") = false, py::arg("threads") = 1)
      .def(
          "run",
          [](const std::shared_ptr<BoundCopy>& copy, const std::vector<std::uintptr_t>& sources,
             Stream* stream) {
            std::vector<const void*> from = const_pointers(sources);
            const py::gil_scoped_release release;
            if (stream == nullptr) {
              copy->run(from);
            } else {
              stream->enqueue([copy, from = std::move(from)] { copy->run(from); });
            }
          },
          py::arg("sources"), py::arg("stream") = nullptr);

  m.def(
      "reduce",
      [](std::uintptr_t dst, DType dst_dtype, float scale, bool accumulate,
         const std::vector<std::uintptr_t>& sources, DType dtype, RedOp op, std::int64_t count) {
        const std::vector<const void*> from = const_pointers(sources);
        const py::gil_scoped_release release;
        reduce_cpu(reinterpret_cast<void*>(dst), {dst_dtype, scale, accumulate}, from.data(),
                   static_cast<int>(from.size()), dtype, op, count);
      },
      py::arg("dst"), py::arg("dst_dtype"), py::arg("scale"), py::arg("accumulate"),
      py::arg("sources"), py::arg("dtype"), py::arg("op"), py::arg("count"));
}

}  // namespace shardcomm::bindings
