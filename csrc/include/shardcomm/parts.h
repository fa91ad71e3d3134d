// How the elements of an all-gather or a reduce-scatter are shared out over the ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace shardcomm {

// The ranks' parts, which lie one after another:
//
//   Parts(3)          0 1 2 | 3 4 5 | 6 7 8      the same count for each rank
//   Parts({1, 0, 4})  0 || 1 2 3 4               a count for each rank
//
// If all counts are the same, the parts are equal.
class Parts {
 public:
  Parts(std::int64_t count = 0) : count_(count) {}  // NOLINT: a count alone means equal parts
  // Throws std::invalid_argument, with the argument's name, if they have no sum.
  explicit Parts(const std::vector<std::int64_t>& counts, const char* argument = "counts")
      : ranks_(counts.size()) {
    std::vector<std::int64_t> ends{0};
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (counts[r] < 0 || counts[r] > kMost - ends.back()) {
        throw std::invalid_argument(std::string(argument) + "[" + std::to_string(r) + "] is " +
                                    std::to_string(counts[r]) +
                                    "; counts must be at least 0 and together at most 2^60");
      }
      ends.push_back(ends.back() + counts[r]);
    }
    count_ = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
    if (std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) != counts.end()) {
      ends_ = std::make_shared<const std::vector<std::int64_t>>(std::move(ends));
    }
  }

  bool equal() const { return ends_ == nullptr; }
  bool are_for(int size) const { return ranks_ == 0 || ranks_ == static_cast<std::size_t>(size); }
  std::int64_t longest() const { return count_; }
  std::int64_t count(int rank) const { return equal() ? count_ : begin(rank + 1) - begin(rank); }
  std::int64_t begin(int rank) const {
    return equal() ? rank * count_ : (*ends_)[static_cast<std::size_t>(rank)];
  }
  // The elements of all `size` ranks.
  std::int64_t total(int size) const { return begin(size); }

  // Of all ranks together, so that no number of their bytes overflows.
  static constexpr std::int64_t kMost = std::int64_t{1} << 60;

 private:
  std::int64_t count_ = 0;                                 // of the longest part
  std::size_t ranks_ = 0;                                  // 0: any number of equal parts
  std::shared_ptr<const std::vector<std::int64_t>> ends_;  // a 0 and each part's end; null: equal
};

}  // namespace shardcomm
