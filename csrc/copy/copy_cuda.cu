#include <algorithm>
#include <cstdint>
#include <utility>

#include "copy/copy_cuda.h"
#include "copy/launch.h"
#include "cuda/runtime.h"

namespace shardcomm {
namespace {

// Elements of one launch of a run, whose threads count in 32 bits.
constexpr std::int64_t kMostRunElements = std::int64_t{1} << 30;

template <class Copy, int kCapacity>
__global__ void __launch_bounds__(kBlockThreads)
    copy_tiles(const Tile* __restrict__ tiles, std::uint32_t num_tiles,
               const __grid_constant__ Operands<kCapacity> operands, float scale,
               std::int32_t* nonfinite) {
  typename Copy::Side side;
  copy_as_thread<Copy>(tiles, num_tiles, operands, scale, blockIdx.x, gridDim.x, threadIdx.x,
                       kBlockThreads, side);
  report_of_block(side, nonfinite);
}

template <class Copy>
__global__ void __launch_bounds__(kBlockThreads)
    copy_run(const typename Copy::Src* src, typename Copy::Dst* dst, std::int64_t count) {
  typename Copy::Side side;
  const Tile tile{0, 0, 0, count, 0, count, 1, count};
  copy_share<Copy>(tile, src, dst, 1.0f, blockIdx.x * kBlockThreads + threadIdx.x,
                   gridDim.x * kBlockThreads, side);
}

template <class Copy, int kCapacity>
void launch_tiles(const Tile* tiles, std::uint32_t num_tiles, const Launch& launch,
                  const void* const* sources, void* const* destinations, const CopyOptions& options,
                  cudaStream_t stream) {
  Operands<kCapacity> operands;
  const void** at = operands.at;
  for (const std::int32_t source : launch.sources) *at++ = sources[source];
  for (const std::int32_t destination : launch.destinations) *at++ = destinations[destination];
  const auto kernel = copy_tiles<Copy, kCapacity>;
  const int blocks = std::min(static_cast<int>(num_tiles), resident_blocks(kernel, kBlockThreads));
  launch_kernel(kernel, blocks, kBlockThreads, stream, tiles, num_tiles, operands, options.scale,
                options.nonfinite);
}

}  // namespace

struct CudaCopy::DeviceLaunch {
  Launch launch;  // without its tiles, which are on the device
  std::unique_ptr<DeviceMemory> tiles;
  std::uint32_t num_tiles;
};

CudaCopy::CudaCopy(const CopyPlan& plan, int device)
    : src_dtype_(plan.src_dtype()), dst_dtype_(plan.dst_dtype()), device_(device) {
  const DeviceScope scope(device);
  for (Launch& launch : launches_of(plan, tile_elements_for(plan, processors()))) {
    const std::size_t bytes = launch.tiles.size() * sizeof(Tile);
    auto tiles = std::make_unique<DeviceMemory>(device, bytes);
    tiles->copy_from_host(launch.tiles.data());
    const auto num_tiles = static_cast<std::uint32_t>(launch.tiles.size());
    launch.tiles = {};
    launches_.push_back({std::move(launch), std::move(tiles), num_tiles});
  }
}

CudaCopy::~CudaCopy() = default;

void CudaCopy::run(const void* const* sources, void* const* destinations,
                   const CopyOptions& options, NativeStream stream) const {
  const DeviceScope scope(device_);
  visit_kernel_copy(src_dtype_, dst_dtype_, options, [&](auto copy) {
    using Copy = decltype(copy);
    for (const DeviceLaunch& each : launches_) {
      const auto run = each.launch.operands() <= kFewOperands ? &launch_tiles<Copy, kFewOperands>
                                                              : &launch_tiles<Copy, kMostOperands>;
      run(static_cast<const Tile*>(each.tiles->data()), each.num_tiles, each.launch, sources,
          destinations, options, static_cast<cudaStream_t>(stream));
    }
  });
}

void convert_cuda(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
                  NativeStream stream) {
  if (dst == src && dst_dtype == src_dtype) return;
  visit_conversion(src_dtype, dst_dtype, [&](auto copy) {
    using Copy = decltype(copy);
    const auto kernel = copy_run<Copy>;
    const auto* from = static_cast<const typename Copy::Src*>(src);
    auto* to = static_cast<typename Copy::Dst*>(dst);
    // One vector a thread before any has two: small runs use all processors.
    constexpr std::int64_t kElements =
        kBlockThreads * kVectorElements<typename Copy::Src, typename Copy::Dst>;
    for (std::int64_t begin = 0; begin < count; begin += kMostRunElements) {
      const std::int64_t n = smaller(kMostRunElements, count - begin);
      const std::int64_t blocks =
          smaller(divide_up(n, kElements), resident_blocks(kernel, kBlockThreads));
      launch_kernel(kernel, static_cast<int>(blocks), kBlockThreads, stream, from + begin,
                    to + begin, n);
    }
  });
}

}  // namespace shardcomm
