#include "copy/bound_copy.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "copy/aligned.h"

namespace shardcomm {
namespace {

void require_aligned(const char* operand, std::size_t number, const void* data, DType dtype) {
  if (!is_aligned(data, dtype)) refuse_misaligned(operand + std::to_string(number), dtype);
}

void require_count(const char* operands, std::size_t given, std::int32_t wanted) {
  if (given != static_cast<std::size_t>(wanted)) {
    throw std::invalid_argument(std::string(operands) + " has " + std::to_string(given) +
                                " pointers, the plan has " + std::to_string(wanted));
  }
}

}  // namespace

BoundCopy::BoundCopy(std::shared_ptr<const CopyPlan> plan, std::vector<const void*> sources,
                     std::vector<void*> destinations, int threads, int device)
    : plan_(std::move(plan)), threads_(threads) {
  if (threads < 1) {
    throw std::invalid_argument("threads is " + std::to_string(threads) +
                                ", it must be at least 1");
  }
  set_operands(std::move(sources), std::move(destinations));
  if (device != kCpu) on_device_ = std::make_shared<CudaCopy>(*plan_, device);
}

void BoundCopy::set_operands(std::vector<const void*> sources, std::vector<void*> destinations) {
  require_count("sources", sources.size(), plan_->num_sources());
  require_count("destinations", destinations.size(), plan_->num_destinations());
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    if (plan_->dst_extents()[i] == 0) continue;
    if (destinations[i] == nullptr) {
      throw std::invalid_argument("destination " + std::to_string(i) + " is null");
    }
    require_aligned("destination ", i, destinations[i], plan_->dst_dtype());
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (plan_->src_extents()[i] == 0) continue;
    require_aligned("source ", i, sources[i], plan_->src_dtype());
  }
  sources_ = std::move(sources);
  destinations_ = std::move(destinations);
}

void BoundCopy::run(const CopyOptions& options, NativeStream stream) const {
  if (on_device_ == nullptr) {
    return copy_cpu(*plan_, sources_.data(), destinations_.data(), options, threads_);
  }
  check_options(*plan_, options);
  on_device_->run(sources_.data(), destinations_.data(), options, stream);
}

}  // namespace shardcomm
