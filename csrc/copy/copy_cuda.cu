#include <algorithm>
#include <cstdint>
#include <utility>

#include "copy/copy_cuda.h"
#include "copy/launch.h"
#include "cuda/runtime.h"

namespace shardcomm {
namespace {

constexpr int kThreads = 256;

template <class Copy, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    copy_tiles(const Tile* __restrict__ tiles, std::uint32_t num_tiles,
               const __grid_constant__ Operands<kCapacity> operands, float scale,
               std::int32_t* nonfinite) {
  typename Copy::Side side;
  copy_as_thread<Copy>(tiles, num_tiles, operands, scale, blockIdx.x, gridDim.x, threadIdx.x,
                       blockDim.x, side);
  report_of_block(side, nonfinite);
}

template <class Copy>
__global__ void __launch_bounds__(kThreads)
    copy_run(const typename Copy::Src* __restrict__ src, typename Copy::Dst* __restrict__ dst,
             const Segment segment, const TileGrid grid) {
  typename Copy::Side side;
  for (std::int64_t t = blockIdx.x; t < grid.tiles; t += gridDim.x) {
    const Tile tile = tile_of(segment, grid, t);
    copy_share<Copy>(tile, src + tile.src_offset, dst + tile.dst_offset, 1.0f, threadIdx.x,
                     blockDim.x, side);
  }
}

template <class Copy, int kCapacity>
void launch_tiles(const Tile* tiles, std::uint32_t num_tiles, int blocks, const Launch& launch,
                  const void* const* sources, void* const* destinations, const CopyOptions& options,
                  cudaStream_t stream) {
  Operands<kCapacity> operands;
  const void** at = operands.at;
  for (const std::int32_t source : launch.sources) *at++ = sources[source];
  for (const std::int32_t destination : launch.destinations) *at++ = destinations[destination];
  launch_kernel(copy_tiles<Copy, kCapacity>, blocks, kThreads, stream, tiles, num_tiles, operands,
                options.scale, options.nonfinite);
}

}  // namespace

struct CudaCopy::DeviceLaunch {
  Launch launch;  // without its tiles, which are on the device
  std::unique_ptr<DeviceMemory> tiles;
  std::uint32_t num_tiles;
  int blocks;
  decltype(&launch_tiles<Moved<std::uint8_t>, kFewOperands>) run;
};

CudaCopy::CudaCopy(const CopyPlan& plan, const CopyOptions& options, int device)
    : options_(options), device_(device) {
  check_options(plan, options);
  const DeviceScope scope(device);
  visit_copy(plan.src_dtype(), plan.dst_dtype(), options, [&](auto copy) {
    using Copy = decltype(copy);
    const int resident = resident_blocks(copy_tiles<Copy, kFewOperands>, kThreads);
    for (Launch& launch : launches_of(plan, tile_elements_for(plan, resident))) {
      const std::size_t bytes = launch.tiles.size() * sizeof(Tile);
      auto tiles = std::make_unique<DeviceMemory>(device, bytes);
      check_cuda(cudaMemcpy(tiles->data(), launch.tiles.data(), bytes, cudaMemcpyHostToDevice),
                 "cudaMemcpy");
      const auto num_tiles = static_cast<std::uint32_t>(launch.tiles.size());
      launch.tiles = {};
      const bool is_small = launch.operands() <= kFewOperands;
      launches_.push_back(
          {std::move(launch), std::move(tiles), num_tiles,
           std::min(static_cast<int>(num_tiles), resident),
           is_small ? &launch_tiles<Copy, kFewOperands> : &launch_tiles<Copy, kMostOperands>});
    }
  });
}

CudaCopy::~CudaCopy() = default;

void CudaCopy::run(const void* const* sources, void* const* destinations,
                   NativeStream stream) const {
  const DeviceScope scope(device_);
  for (const DeviceLaunch& each : launches_) {
    each.run(static_cast<const Tile*>(each.tiles->data()), each.num_tiles, each.blocks, each.launch,
             sources, destinations, options_, static_cast<cudaStream_t>(stream));
  }
}

void convert_cuda(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
                  NativeStream stream) {
  if (count == 0 || (dst == src && dst_dtype == src_dtype)) return;
  visit_conversion(src_dtype, dst_dtype, [&](auto copy) {
    using Copy = decltype(copy);
    const int resident = resident_blocks(copy_run<Copy>, kThreads);
    const Segment segment{0, 0, 0, count, 0, count, 1, count};
    const std::int64_t share = divide_up(divide_up(count, 4 * resident), kCutElements);
    const TileGrid grid = tile_grid(
        segment, std::min<std::int64_t>(std::max<std::int64_t>(share, 8), 64) * kCutElements);
    const auto blocks = static_cast<int>(std::min<std::int64_t>(grid.tiles, resident));
    launch_kernel(copy_run<Copy>, blocks, kThreads, stream,
                  static_cast<const typename Copy::Src*>(src),
                  static_cast<typename Copy::Dst*>(dst), segment, grid);
  });
}

}  // namespace shardcomm
