// A CopyPlan with its destinations: what a step runs again and again, from other sources each time.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shardcomm/copy_plan.h"

namespace shardcomm {

class BoundCopy {
 public:
  BoundCopy(std::shared_ptr<const CopyPlan> plan, std::vector<void*> destinations,
            CopyOptions options)
      : plan_(std::move(plan)), destinations_(std::move(destinations)), options_(options) {
    check("destinations", destinations_.size(), plan_->num_destinations());
  }

  void run(const std::vector<const void*>& sources) const {
    check("sources", sources.size(), plan_->num_sources());
    copy_cpu(*plan_, sources.data(), destinations_.data(), options_);
  }

 private:
  static void check(const char* what, std::size_t given, std::int32_t wanted) {
    if (given < static_cast<std::size_t>(wanted)) {
      throw std::invalid_argument(std::string("copy: ") + std::to_string(given) + " " + what +
                                  " given; the plan has " + std::to_string(wanted));
    }
  }

  std::shared_ptr<const CopyPlan> plan_;
  std::vector<void*> destinations_;
  CopyOptions options_;
};

}  // namespace shardcomm
