// Which ranks share a host, for collectives that keep most of their bytes inside of hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardcomm {

//   hosts of ranks 0 to 5:   A B A B A B
//   node 0 (A): ranks 0 2 4      node 1 (B): ranks 1 3 5
//
// Nodes are numbered in the order of their first ranks, and ranks within a node in their own order.
class Nodes {
 public:
  Nodes() = default;
  explicit Nodes(const std::vector<std::uint64_t>& host_of_rank);

  int count() const { return static_cast<int>(ranks_.size()); }
  bool uniform() const;  // whether all nodes have the same number of ranks
  // How many ranks the first node has.
  int size() const { return static_cast<int>(ranks_.front().size()); }
  int node_of(int rank) const { return places_[static_cast<std::size_t>(rank)].node; }
  int index_of(int rank) const { return places_[static_cast<std::size_t>(rank)].index; }
  int rank_at(int node, int index) const {
    return ranks_[static_cast<std::size_t>(node)][static_cast<std::size_t>(index)];
  }

 private:
  struct Place {
    int node;
    int index;  // the rank's number among those of the node
  };
  std::vector<Place> places_;            // the place of each rank
  std::vector<std::vector<int>> ranks_;  // the ranks of each node
};

}  // namespace shardcomm
