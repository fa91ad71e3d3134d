#include "comm/nodes.h"

#include <algorithm>
#include <map>

namespace shardcomm {

Nodes::Nodes(const std::vector<std::uint64_t>& host_of_rank) {
  std::map<std::uint64_t, int> numbers;
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const auto [found, is_new] = numbers.try_emplace(host_of_rank[rank], count());
    if (is_new) ranks_.emplace_back();
    std::vector<int>& ranks = ranks_[static_cast<std::size_t>(found->second)];
    places_.push_back({found->second, static_cast<int>(ranks.size())});
    ranks.push_back(static_cast<int>(rank));
  }
}

bool Nodes::uniform() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [this](const std::vector<int>& ranks) {
    return ranks.size() == ranks_.front().size();
  });
}

}  // namespace shardcomm
