// The executor of copy plans, run by the CPU when its turn on a fake stream comes.
#include <memory>
#include <vector>

#include "copy/copy_cuda.h"
#include "fake_cuda.h"

namespace shardcomm {

// One for a whole plan.
struct CudaCopy::DeviceLaunch {
  std::shared_ptr<const CopyPlan> plan;
};

CudaCopy::CudaCopy(const CopyPlan& plan, int device)
    : src_dtype_(plan.src_dtype()), dst_dtype_(plan.dst_dtype()), device_(device) {
  launches_.push_back({std::make_shared<const CopyPlan>(plan)});
}

CudaCopy::~CudaCopy() = default;

void CudaCopy::run(const void* const* sources, void* const* destinations,
                   const CopyOptions& options, NativeStream stream) const {
  const std::shared_ptr<const CopyPlan>& plan = launches_.front().plan;
  const std::vector<const void*> from(sources, sources + plan->num_sources());
  const std::vector<void*> to(destinations, destinations + plan->num_destinations());
  fake_enqueue(static_cast<cudaStream_t>(stream),
               [plan, from, to, options] { copy_cpu(*plan, from.data(), to.data(), options); });
}

}  // namespace shardcomm
