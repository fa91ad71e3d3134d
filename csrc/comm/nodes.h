// Which ranks share a host, for collectives that keep most of their bytes inside of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardcomm {

//   hosts of ranks 0 to 5:   A B A B A B
//   node 0 (A): ranks 0 2 4      node 1 (B): ranks 1 3 5
//
// Nodes are numbered as their first ranks come, and so are the ranks within a node.
class Nodes {
 public:
  Nodes() = default;
  explicit Nodes(const std::vector<std::uint64_t>& host_of_rank);

  int count() const { return static_cast<int>(ranks_.size()); }
  bool uniform() const;  // every node has as many ranks as the others
  int size() const { return static_cast<int>(ranks_.front().size()); }  // of the first node
  int node_of(int rank) const { return places_[static_cast<std::size_t>(rank)].node; }
  int index_of(int rank) const { return places_[static_cast<std::size_t>(rank)].index; }
  int rank_at(int node, int index) const {
    return ranks_[static_cast<std::size_t>(node)][static_cast<std::size_t>(index)];
  }

 private:
  struct Place {
    int node;
    int index;  // among the ranks of the node
  };
  std::vector<Place> places_;            // of each rank
  std::vector<std::vector<int>> ranks_;  // of each node
};

}  // namespace shardcomm
