#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "bindings/optional_stream.h"
#include "copy/bound_copy.h"
#include "copy/launch.h"
#include "copy/reduce_cuda.h"
#include "copy/simd.h"
#include "copy/thread_reduce.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm::bindings {
namespace {

using Fields = std::array<std::int64_t, 8>;
using Addresses = std::vector<std::uintptr_t>;

std::int32_t operand(std::int64_t index) {
  if (index < INT32_MIN || index >= INT32_MAX) {
    throw std::invalid_argument("operand " + std::to_string(index) + " does not fit into 31 bits");
  }
  return static_cast<std::int32_t>(index);
}

Segment segment(const Fields& f) {
  return {operand(f[0]), operand(f[1]), f[2], f[3], f[4], f[5], f[6], f[7]};
}

std::vector<Segment> segments_of(const std::vector<Fields>& rows) {
  std::vector<Segment> segments;
  segments.reserve(rows.size());
  for (const Fields& row : rows) segments.push_back(segment(row));
  return segments;
}

// An int64 array of shape (n, 8).
std::vector<Segment> segments_of(const py::buffer& array) {
  const py::buffer_info view = array.request();
  const bool is_int64 = view.item_type_is_equivalent_to<std::int64_t>();
  if (!is_int64 || view.ndim != 2 || view.shape[1] != 8) {
    throw std::invalid_argument("segments must be an int64 array of shape (n, 8)");
  }
  std::vector<Segment> segments;
  segments.reserve(static_cast<std::size_t>(view.shape[0]));
  for (py::ssize_t i = 0; i < view.shape[0]; ++i) {
    Fields fields{};
    for (py::ssize_t j = 0; j < 8; ++j) {
      const char* at =
          static_cast<const char*>(view.ptr) + i * view.strides[0] + j * view.strides[1];
      fields[static_cast<std::size_t>(j)] = *reinterpret_cast<const std::int64_t*>(at);
    }
    segments.push_back(segment(fields));
  }
  return segments;
}

std::int32_t* flag(std::uintptr_t address) { return reinterpret_cast<std::int32_t*>(address); }

template <class Pointer>
std::vector<Pointer> pointers(const Addresses& addresses) {
  std::vector<Pointer> result;
  result.reserve(addresses.size());
  for (std::uintptr_t address : addresses) result.push_back(reinterpret_cast<Pointer>(address));
  return result;
}

std::vector<py::tuple> fields_of(const std::vector<Segment>& segments) {
  std::vector<py::tuple> rows;
  rows.reserve(segments.size());
  for (const Segment& s : segments) {
    rows.push_back(py::make_tuple(s.src, s.dst, s.src_offset, s.src_pitch, s.dst_offset,
                                  s.dst_pitch, s.rows, s.cols));
  }
  return rows;
}

template <class Segments>
std::shared_ptr<CopyPlan> make_plan(const Segments& segments, DType src_dtype, DType dst_dtype) {
  return std::make_shared<CopyPlan>(segments_of(segments), src_dtype, dst_dtype);
}

std::shared_ptr<BoundCopy> bind_pointers(std::shared_ptr<CopyPlan> plan, const Addresses& sources,
                                         const Addresses& destinations, int threads, int device) {
  // Its tiles on a device are freed when the device is done.
  return destroyed_without_lock(
      std::make_shared<BoundCopy>(std::move(plan), pointers<const void*>(sources),
                                  pointers<void*>(destinations), threads, device));
}

void run_bound(const BoundCopy& bound, float scale, bool accumulate, std::uintptr_t nonfinite,
               OptionalStream stream) {
  const CopyOptions options{scale, accumulate, flag(nonfinite)};
  check_options(bound.plan(), options);
  const WithoutLock scope;
  if (!stream.has_value()) {
    bound.run(options, nullptr);
  } else {
    // A copy: sources set later are for later runs.
    (*stream)->enqueue([bound, options](NativeStream native) { bound.run(options, native); });
  }
}

void walk(const CopyPlan& plan, const Addresses& sources, const Addresses& destinations,
          float scale, bool accumulate, std::int64_t tile_elements, std::size_t most_operands,
          std::uint32_t blocks, std::uint32_t threads, std::uintptr_t nonfinite) {
  const auto from = pointers<const void*>(sources);
  const auto to = pointers<void*>(destinations);
  if (from.size() != plan.src_extents().size() || to.size() != plan.dst_extents().size()) {
    throw std::invalid_argument("there must be as many sources and destinations as the plan has");
  }
  walk_launches(plan, from.data(), to.data(), {scale, accumulate, flag(nonfinite)}, tile_elements,
                most_operands, blocks, threads);
}

// `divisor` 0: as many as there are sources.
int divisor_of(int divisor, const Addresses& sources) {
  return divisor == 0 ? static_cast<int>(sources.size()) : divisor;
}

void reduce(std::uintptr_t dst, DType dst_dtype, float scale, bool accumulate,
            const Addresses& sources, DType dtype, RedOp op, std::int64_t count,
            std::uintptr_t nonfinite, int divisor) {
  const auto sources_of = pointers<const void*>(sources);
  const WithoutLock scope;
  reduce_cpu(pointer(dst), epilogue_of(dst_dtype, scale, accumulate, nonfinite), sources_of.data(),
             static_cast<int>(sources_of.size()), dtype, op, divisor_of(divisor, sources), count);
}

void reduce_on_device(Stream& stream, std::uintptr_t dst, DType dst_dtype, float scale,
                      bool accumulate, const Addresses& sources, DType dtype, RedOp op,
                      std::int64_t count, std::uintptr_t nonfinite, int divisor) {
  const auto sources_of = pointers<const void*>(sources);
  const Epilogue epilogue = epilogue_of(dst_dtype, scale, accumulate, nonfinite);
  const int divided = divisor_of(divisor, sources);
  const WithoutLock scope;
  stream.enqueue([=](NativeStream native) {
    reduce_cuda(pointer(dst), epilogue, sources_of.data(), static_cast<int>(sources_of.size()),
                dtype, op, divided, count, native);
  });
}

void walk_reduction(std::uintptr_t dst, DType dst_dtype, float scale, bool accumulate,
                    const Addresses& sources, DType dtype, RedOp op, std::int64_t count,
                    std::int64_t threads, std::uintptr_t nonfinite, int divisor) {
  const auto sources_of = pointers<const void*>(sources);
  walk_reduce(pointer(dst), epilogue_of(dst_dtype, scale, accumulate, nonfinite), sources_of.data(),
              static_cast<int>(sources_of.size()), dtype, op, divisor_of(divisor, sources), count,
              threads);
}

}  // namespace

void bind_copy(py::module_& m) {
  py::class_<CopyPlan, std::shared_ptr<CopyPlan>>(m, "CopyPlan")
      .def(py::init(&make_plan<py::buffer>), py::arg("segments"), py::arg("src_dtype"),
           py::arg("dst_dtype"))
      .def(py::init(&make_plan<std::vector<Fields>>), py::arg("segments"), py::arg("src_dtype"),
           py::arg("dst_dtype"))
      .def_property_readonly("segments",
                             [](const CopyPlan& plan) { return fields_of(plan.segments()); })
      .def_property_readonly("tiles", [](const CopyPlan& plan) { return fields_of(plan.tiles()); })
      .def_property_readonly("src_dtype", &CopyPlan::src_dtype)
      .def_property_readonly("dst_dtype", &CopyPlan::dst_dtype)
      .def_property_readonly("src_extents", &CopyPlan::src_extents)
      .def_property_readonly("dst_extents", &CopyPlan::dst_extents)
      .def_property_readonly("num_sources", &CopyPlan::num_sources)
      .def_property_readonly("elements", &CopyPlan::elements);

  py::class_<BoundCopy, std::shared_ptr<BoundCopy>>(m, "BoundCopy")
      .def(py::init(&bind_pointers), py::arg("plan"), py::arg("sources"), py::arg("destinations"),
           py::arg("threads") = 1, py::arg("device") = BoundCopy::kCpu)
      .def(
          "set_operands",
          [](BoundCopy& bound, const Addresses& sources, const Addresses& destinations) {
            bound.set_operands(pointers<const void*>(sources), pointers<void*>(destinations));
          },
          py::arg("sources"), py::arg("destinations"))
      .def("run", &run_bound, py::arg("scale") = 1.0f, py::arg("accumulate") = false,
           py::arg("nonfinite") = 0, py::arg("stream") = py::none());

  m.def("walk_launches", &walk, py::arg("plan"), py::arg("sources"), py::arg("destinations"),
        py::arg("scale"), py::arg("accumulate"), py::arg("tile_elements"), py::arg("most_operands"),
        py::arg("blocks"), py::arg("threads"), py::arg("nonfinite") = 0,
        "The CUDA copy kernel's code on the CPU, block by block and thread by thread.");

  m.def("reduce", &reduce, py::arg("dst"), py::arg("dst_dtype"), py::arg("scale"),
        py::arg("accumulate"), py::arg("sources"), py::arg("dtype"), py::arg("op"),
        py::arg("count"), py::arg("nonfinite") = 0, py::arg("divisor") = 0);
  m.def("reduce_cuda", &reduce_on_device, py::arg("stream"), py::arg("dst"), py::arg("dst_dtype"),
        py::arg("scale"), py::arg("accumulate"), py::arg("sources"), py::arg("dtype"),
        py::arg("op"), py::arg("count"), py::arg("nonfinite") = 0, py::arg("divisor") = 0,
        "On a stream of a device: what the transports launch.");
  m.def("walk_reduce", &walk_reduction, py::arg("dst"), py::arg("dst_dtype"), py::arg("scale"),
        py::arg("accumulate"), py::arg("sources"), py::arg("dtype"), py::arg("op"),
        py::arg("count"), py::arg("threads"), py::arg("nonfinite") = 0, py::arg("divisor") = 0,
        "The CUDA reduction kernel's code on the CPU, thread by thread.");

  py::enum_<InstructionSet> instruction_sets_enum(m, "InstructionSet");
  for (InstructionSet set :
       {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    instruction_sets_enum.value(name(set), set);
  }
  m.def("instruction_sets", &instruction_sets);
  m.def("instruction_set", &instruction_set);
  m.def("use_instruction_set", &use_instruction_set, py::arg("set"));
}

}  // namespace shardcomm::bindings
