// A CopyPlan with its pointers: everything checked and looked up, ready to run every step, also on
// a Stream.
#pragma once

#include <memory>
#include <vector>

#include "copy/copy_cuda.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// Does not own the memory. A value: what is enqueued is a copy of it.
class BoundCopy {
 public:
  static constexpr int kCpu = -1;

  // On the CPU, with so many threads, or a CUDA device, which has all the pointers.
  // Throws std::invalid_argument for a number of pointers that is not the plan's, a null
  // destination, and threads < 1.
  BoundCopy(std::shared_ptr<const CopyPlan> plan, std::vector<const void*> sources,
            std::vector<void*> destinations, int threads = 1, int device = kCpu);

  // As in the constructor. A null source: zeros.
  void set_operands(std::vector<const void*> sources, std::vector<void*> destinations);
  // Nothing is made or allocated for other options than before. Throws as check_options does.
  void run(const CopyOptions& options, NativeStream stream) const;
  const CopyPlan& plan() const { return *plan_; }

 private:
  std::shared_ptr<const CopyPlan> plan_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
  int threads_;
  std::shared_ptr<const CudaCopy> on_device_;  // null: on the CPU
};

}  // namespace shardcomm
