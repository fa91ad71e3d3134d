// A CopyPlan with its pointers. Everything is checked and looked up once, so that every step can
// run it, also on a Stream.
#pragma once

#include <memory>
#include <vector>

#include "copy/copy_cuda.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// It does not own the memory. It is a value: a Stream that has it enqueued holds a copy.
class BoundCopy {
 public:
  static constexpr int kCpu = -1;

  // Runs on the CPU with `threads` threads, or on the CUDA device `device`, where all the pointers
  // then have to be. A null source stands for zeros. Throws std::invalid_argument for a number of
  // pointers that is not the plan's, a null destination, a pointer that is not aligned to its
  // elements, and threads < 1.
  BoundCopy(std::shared_ptr<const CopyPlan> plan, std::vector<const void*> sources,
            std::vector<void*> destinations, int threads = 1, int device = kCpu);

  // Replaces the pointers; they obey the constructor's rules.
  void set_operands(std::vector<const void*> sources, std::vector<void*> destinations);
  // Each run may have other options; new ones allocate nothing. Throws what check_options throws.
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
