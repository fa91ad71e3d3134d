// The search for the shortest shard.
//
// Given a shard length S and an order, every parameter takes the first place where no boundary cuts
// a granule (`first_valid`); an order decides the rest, so a few are tried (`fits`). Which S are
// worth trying? A parameter longer than 2S spans two boundaries wherever it lies, so S must be a
// multiple of its granule. Those that force S are thus always the longest ones, and the candidates
// are the multiples of a few steps: the least common multiples of the alignment and the granules of
// the 0, 1, 2, ... longest parameters (`plan_layout`).
//
// Never longer than the least-common-multiple method: with the last step, that of all parameters,
// a boundary costs less than one step when they are placed one after another. So that method stops
// at one of the step's first two multiples that could hold all elements, and `try_multiples` tries
// both, in that very order.
#include "shardcomm/layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace shardcomm {
namespace {

constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / 4;
constexpr std::int64_t kNowhere = kMaxElements + 1;

// What bounds the search's time: the parameters up to which all orders are tried; candidates tried
// one by one before their distance doubles; orders tried from each start; and the places looked at
// (about 1 ns each) after which only the given order is tried.
constexpr std::size_t kAllOrdersUpTo = 5;
constexpr int kConsecutiveCandidates = 16;
constexpr int kOrdersPerStart = 4;
constexpr std::int64_t kPlacesLookedAt = 2'000'000;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Beyond kMaxElements no length can be a multiple of it, so the exact value does not matter.
std::int64_t capped_product(std::int64_t a, std::int64_t b) {
  return b != 0 && a > kMaxElements / b ? kMaxElements + 1 : a * b;
}

std::int64_t capped_lcm(std::int64_t a, std::int64_t b) {
  return capped_product(a / std::gcd(a, b), b);
}

// A parameter that has elements. All in elements.
struct Item {
  std::size_t param;     // its index
  std::int64_t length;   // rounded up to the alignment
  std::int64_t granule;  // at most the parameter
  std::int64_t
      cut;  // the first boundary inside lies at a multiple of this, for the start is aligned
};

using Order = std::vector<Item>;

struct Gap {
  std::int64_t begin;
  std::int64_t end;
};

// The first offset at or after `at` where no boundary k*shard cuts a granule; kNowhere if no offset
// is such.
std::int64_t first_valid(const Item& item, std::int64_t at, std::int64_t shard) {
  const std::int64_t room = shard - at % shard;
  if (item.length <= room) return at;

  // It crosses the next boundary: move so that whole granules lie before it, as many as there is
  // room for.
  const std::int64_t boundary = at + room;
  const std::int64_t head = room - room % item.cut;
  const bool later_boundaries_fall_right = shard % item.granule == 0;
  if (later_boundaries_fall_right) return boundary - head;
  if (head > 0 && item.length - head <= shard) return boundary - head;

  // It may cross only one boundary and cannot cross this one.
  if (item.length <= shard) return boundary;
  const std::int64_t longest_head = shard - shard % item.cut;
  if (item.length - longest_head > shard) return kNowhere;
  return boundary + shard - longest_head;
}

class Search {
 public:
  // Starts from what is always possible: everything on one rank.
  Search(const Order& given, std::size_t num_params, int world_size)
      : world_size_(world_size), given_(given), by_length_(given), offsets_(num_params) {
    // Equal ones keep the given order. To clang, std::stable_sort of libstdc++ 12 is deprecated.
    std::sort(by_length_.begin(), by_length_.end(), [](const Item& a, const Item& b) {
      return std::tie(b.length, a.param) < std::tie(a.length, b.param);
    });
    by_cut_ = by_length_;
    std::sort(by_cut_.begin(), by_cut_.end(), [](const Item& a, const Item& b) {
      return std::tie(b.cut, b.length, a.param) < std::tie(a.cut, a.length, b.param);
    });
    for (const Item& item : given_) shard_ += item.length;
    place(given_, shard_, /*fill_gaps=*/false);
    best_offsets_ = offsets_;
  }

  std::int64_t shard() const { return shard_; }
  const std::vector<std::int64_t>& offsets() const { return best_offsets_; }
  const Order& by_length() const { return by_length_; }

  // Looks for a shorter shard among the multiples of `step` from `from` on: upwards, first one by
  // one, then at doubling distances; at last by bisection between the shortest shard known and the
  // longest that failed.
  void try_multiples(std::int64_t step, std::int64_t from) {
    std::int64_t candidate = round_up(from, step);
    std::int64_t infeasible = candidate - step;
    std::int64_t distance = step;
    for (int tried = 1; candidate < shard_ && !improves(candidate); ++tried) {
      infeasible = candidate;
      if (tried >= kConsecutiveCandidates) distance = capped_product(distance, 2);
      candidate += distance;
    }
    while (shard_ - infeasible > step) {
      const std::int64_t steps = (shard_ - infeasible) / step;
      const std::int64_t middle = infeasible + std::max<std::int64_t>(steps / 2, 1) * step;
      if (!improves(middle)) infeasible = middle;
    }
  }

 private:
  bool improves(std::int64_t shard) {
    if (!fits(shard)) return false;
    shard_ = shard;
    best_offsets_ = offsets_;
    return true;
  }

  // The given order comes first, so it is kept wherever it costs nothing. From each start, a
  // parameter that found no place is placed first in the next try.
  bool fits(std::int64_t shard) {
    if (!place(given_, shard, /*fill_gaps=*/false)) return true;
    if (given_.size() <= kAllOrdersUpTo) return fits_in_some_order(shard);
    for (const Order* start : {&given_, &by_cut_, &by_length_}) {
      Order order = *start;
      for (int tried = 0; tried < kOrdersPerStart; ++tried) {
        if (places_looked_at_ > kPlacesLookedAt) return false;
        const std::optional<std::size_t> failed = place(order, shard, /*fill_gaps=*/true);
        if (!failed) return true;
        if (*failed == 0) break;
        const auto item = order.begin() + static_cast<std::ptrdiff_t>(*failed);
        std::rotate(order.begin(), item, item + 1);
      }
    }
    return false;
  }

  // Exact: in any feasible placement each parameter can move down to its first valid place.
  bool fits_in_some_order(std::int64_t shard) {
    const auto before = [](const Item& a, const Item& b) { return a.param < b.param; };
    Order order = given_;
    while (std::next_permutation(order.begin(), order.end(), before)) {
      if (!place(order, shard, /*fill_gaps=*/false)) return true;
    }
    return false;
  }

  // Places in this order; returns the position of the first item that finds no place.
  std::optional<std::size_t> place(const Order& order, std::int64_t shard, bool fill_gaps) {
    gaps_.clear();
    std::int64_t cursor = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Item& item = order[i];
      if (fill_gaps && fill_gap(item, shard)) continue;
      ++places_looked_at_;
      const std::int64_t offset = first_valid(item, cursor, shard);
      if (offset > world_size_ * shard - item.length) return i;
      if (offset > cursor) gaps_.push_back({cursor, offset});
      offsets_[item.param] = offset;
      cursor = offset + item.length;
    }
    return std::nullopt;
  }

  bool fill_gap(const Item& item, std::int64_t shard) {
    places_looked_at_ += static_cast<std::int64_t>(gaps_.size());
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
      if (gap->end - gap->begin < item.length) continue;
      const std::int64_t offset = first_valid(item, gap->begin, shard);
      if (offset > gap->end - item.length) continue;
      offsets_[item.param] = offset;
      const Gap before{gap->begin, offset};
      gap->begin = offset + item.length;
      if (before.end > before.begin) gaps_.insert(gap, before);
      return true;
    }
    return false;
  }

  std::int64_t world_size_;
  Order given_;
  Order by_length_;
  Order by_cut_;
  std::int64_t shard_ = 0;                  // the best so far
  std::vector<std::int64_t> best_offsets_;  // of each parameter, with that shard
  std::vector<std::int64_t> offsets_;       // of the placement under way, and its gaps
  std::vector<Gap> gaps_;
  std::int64_t places_looked_at_ = 0;
};

// The parameters that have elements, in order. Throws if anything is out of range.
Order items_of(const std::vector<ParamExtent>& params, int world_size, std::int64_t align) {
  if (world_size < 1) {
    throw std::invalid_argument("world_size is " + std::to_string(world_size) +
                                "; it must be at least 1");
  }
  if (align < 1 || align > kMaxElements) {
    throw std::invalid_argument("align_elements is " + std::to_string(align) +
                                "; it must be at least 1 and at most " +
                                std::to_string(kMaxElements));
  }
  Order items;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ParamExtent& p = params[i];
    if (p.rows < 0 || p.row_elements < 0 || p.granule_rows < 1) {
      throw std::invalid_argument(
          "params[" + std::to_string(i) + "] has rows " + std::to_string(p.rows) +
          ", row_elements " + std::to_string(p.row_elements) + ", granule_rows " +
          std::to_string(p.granule_rows) +
          "; accepted are rows and row_elements from 0 on and granule_rows from 1 on");
    }
    if (p.rows == 0 || p.row_elements == 0) continue;
    const std::int64_t length = round_up(capped_product(p.rows, p.row_elements), align);
    total += length;
    if (total > kMaxElements / world_size) {
      throw std::invalid_argument(
          "params up to params[" + std::to_string(i) + "] have " + std::to_string(total) +
          " elements or more; accepted are at most " + std::to_string(kMaxElements / world_size) +
          " on " + std::to_string(world_size) + " ranks");
    }
    const std::int64_t granule = std::min(p.granule_rows, p.rows) * p.row_elements;
    items.push_back({i, length, granule, capped_lcm(granule, align)});
  }
  return items;
}

// Multiples of `step` are candidates from `from` on; shorter shards would be forced by more
// parameters.
struct Step {
  std::int64_t step;
  std::int64_t from;
};

void add_step(std::vector<Step>& steps, std::int64_t step, std::int64_t from) {
  if (!steps.empty() && steps.back().step == step) steps.pop_back();
  steps.push_back({step, from});
}

}  // namespace

LayoutResult plan_layout(const std::vector<ParamExtent>& params, int world_size,
                         std::int64_t align_elements) {
  const Order items = items_of(params, world_size, align_elements);
  if (items.empty()) return {0, std::vector<std::int64_t>(params.size(), 0), {}};

  Search search(items, params.size(), world_size);
  const std::int64_t all_elements = search.shard();
  std::int64_t lower_bound = (all_elements + world_size - 1) / world_size;
  for (const Item& item : items) lower_bound = std::max(lower_bound, item.granule);

  std::vector<Step> steps;
  std::int64_t step = align_elements;
  for (const Item& next : search.by_length()) {
    add_step(steps, step, std::max(lower_bound, next.length / 2));
    step = capped_lcm(step, next.granule);
  }
  add_step(steps, step, lower_bound);

  // The longest step has the fewest candidates, and what it finds bounds the others.
  for (auto it = steps.rbegin(); it != steps.rend(); ++it) {
    if (it->step < search.shard()) search.try_multiples(it->step, it->from);
  }

  LayoutResult result{search.shard(), search.offsets(), {}};
  for (const Item& item : items) {
    const std::int64_t offset = result.offsets[item.param];
    const std::int64_t boundaries =
        (offset + item.length - 1) / result.shard_elements - offset / result.shard_elements;
    // A granule that divides the alignment divides S anyway.
    if (boundaries >= 2 && align_elements % item.granule != 0) {
      result.forced_by.push_back(static_cast<std::int32_t>(item.param));
    }
  }
  return result;
}

}  // namespace shardcomm
