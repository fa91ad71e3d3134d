#include "copy/blocks.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "bindings/optional_stream.h"
#include "copy/blocks_cuda.h"
#include "copy/thread_blocks.h"
#include "shardcomm/blocks.h"
#include "shardcomm/stream.h"

namespace shardcomm::bindings {
namespace {

// The address, the number of elements, the first block.
using Segments = std::vector<std::tuple<std::uintptr_t, std::int64_t, std::int64_t>>;

// Segment: EncodedSegment or DecodedSegment.
template <class Segment>
std::vector<Segment> as(const Segments& segments) {
  std::vector<Segment> result;
  result.reserve(segments.size());
  for (const auto& [address, count, first] : segments) {
    result.push_back({pointer(address), count, first});
  }
  return result;
}

// Runs on_host() or on_device(stream), at once or on a stream.
template <class OnHost, class OnDevice>
void run_on(OptionalStream stream, int device, const OnHost& on_host, const OnDevice& on_device) {
  const WithoutLock scope;
  if (device >= 0) {
    (*stream)->enqueue([on_device](NativeStream native) { on_device(native); });
  } else if (stream.has_value()) {
    (*stream)->enqueue([on_host](NativeStream) { on_host(); });
  } else {
    on_host();
  }
}

void encode(const BlockFormat& format, const Segments& segments, DType dtype, std::uintptr_t wire,
            std::int64_t bytes, std::uint64_t seed, std::uintptr_t stats, int threads, int device,
            OptionalStream stream) {
  // Here, and not on the stream, so that the caller gets the error.
  check_wire(format, pointer(wire), bytes, dtype);
  check_threads(threads);
  auto* tally = static_cast<BlockStats*>(pointer(stats));
  const auto from = sorted(format, as<EncodedSegment>(segments), wire_blocks(format, bytes));
  run_on(
      stream, device,
      [=] { encode_cpu(format, from, dtype, pointer(wire), bytes, seed, tally, threads); },
      [=](NativeStream native) {
        encode_cuda(format, from, dtype, pointer(wire), bytes, seed, tally, native);
      });
}

void decode(const BlockFormat& format, std::uintptr_t wire, std::int64_t bytes,
            const Segments& segments, DType dtype, int threads, int device, OptionalStream stream) {
  check_wire(format, pointer(wire), bytes, dtype);
  check_threads(threads);
  const auto to = sorted(format, as<DecodedSegment>(segments), wire_blocks(format, bytes));
  run_on(
      stream, device, [=] { decode_cpu(format, pointer(wire), bytes, to, dtype, threads); },
      [=](NativeStream native) { decode_cuda(format, pointer(wire), bytes, to, dtype, native); });
}

void decode_sum(const BlockFormat& format, std::uintptr_t wires, int parts, std::uintptr_t dst,
                std::int64_t count, DType dtype, float scale, bool accumulate,
                std::uintptr_t nonfinite, int threads, int device, OptionalStream stream) {
  check_threads(threads);
  const Epilogue epilogue = epilogue_of(dtype, scale, accumulate, nonfinite);
  check_parts(format, pointer(wires), parts, count, epilogue);
  run_on(
      stream, device,
      [=] {
        decode_sum_cpu(format, pointer(wires), parts, pointer(dst), count, epilogue, threads);
      },
      [=](NativeStream native) {
        decode_sum_cuda(format, pointer(wires), parts, pointer(dst), count, epilogue, native);
      });
}

void walk_encode_blocks(const BlockFormat& format, const Segments& segments, DType dtype,
                        std::uintptr_t wire, std::int64_t bytes, std::uint64_t seed,
                        std::uintptr_t stats, std::int64_t teams, std::size_t most_segments) {
  walk_encode(format, as<EncodedSegment>(segments), dtype, pointer(wire), bytes, seed,
              static_cast<BlockStats*>(pointer(stats)), teams, most_segments);
}

void walk_decode_blocks(const BlockFormat& format, std::uintptr_t wire, std::int64_t bytes,
                        const Segments& segments, DType dtype, std::int64_t teams,
                        std::size_t most_segments) {
  walk_decode(format, pointer(wire), bytes, as<DecodedSegment>(segments), dtype, teams,
              most_segments);
}

void walk_decode_sum_blocks(const BlockFormat& format, std::uintptr_t wires, int parts,
                            std::uintptr_t dst, std::int64_t count, DType dtype, float scale,
                            bool accumulate, std::uintptr_t nonfinite, std::int64_t teams) {
  const Epilogue epilogue = epilogue_of(dtype, scale, accumulate, nonfinite);
  walk_decode_sum(format, pointer(wires), parts, pointer(dst), count, epilogue, teams);
}

}  // namespace

void bind_blocks(py::module_& m) {
  py::enum_<BlockCode>(m, "BlockCode")
      .value("mxint8", BlockCode::mxint8)
      .value("mxfp8", BlockCode::mxfp8);
  py::enum_<Rounding>(m, "Rounding")
      .value("nearest", Rounding::nearest)
      .value("stochastic", Rounding::stochastic);
  py::class_<BlockFormat>(m, "BlockFormat")
      .def(py::init<BlockCode, int, Rounding>(), py::arg("code"), py::arg("block"),
           py::arg("rounding"));

  m.def("wire_bytes", &wire_bytes, py::arg("format"), py::arg("elements"));
  m.def("encode_blocks", &encode, py::arg("format"), py::arg("segments"), py::arg("dtype"),
        py::arg("wire"), py::arg("bytes"), py::arg("seed"), py::arg("stats"), py::arg("threads"),
        py::arg("device"), py::arg("stream"));
  m.def("decode_blocks", &decode, py::arg("format"), py::arg("wire"), py::arg("bytes"),
        py::arg("segments"), py::arg("dtype"), py::arg("threads"), py::arg("device"),
        py::arg("stream"));
  m.def("decode_sum", &decode_sum, py::arg("format"), py::arg("wires"), py::arg("parts"),
        py::arg("dst"), py::arg("count"), py::arg("dtype"), py::arg("scale"), py::arg("accumulate"),
        py::arg("nonfinite"), py::arg("threads"), py::arg("device"), py::arg("stream"));

  constexpr const char* kWalk = "The CUDA kernel's code on the CPU, thread by thread.";
  m.def("walk_encode_blocks", &walk_encode_blocks, py::arg("format"), py::arg("segments"),
        py::arg("dtype"), py::arg("wire"), py::arg("bytes"), py::arg("seed"), py::arg("stats"),
        py::arg("teams"), py::arg("most_segments"), kWalk);
  m.def("walk_decode_blocks", &walk_decode_blocks, py::arg("format"), py::arg("wire"),
        py::arg("bytes"), py::arg("segments"), py::arg("dtype"), py::arg("teams"),
        py::arg("most_segments"), kWalk);
  m.def("walk_decode_sum", &walk_decode_sum_blocks, py::arg("format"), py::arg("wires"),
        py::arg("parts"), py::arg("dst"), py::arg("count"), py::arg("dtype"), py::arg("scale"),
        py::arg("accumulate"), py::arg("nonfinite"), py::arg("teams"), kWalk);
}

}  // namespace shardcomm::bindings
