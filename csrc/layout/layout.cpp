#include "shardcomm/layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace shardcomm {
namespace {

constexpr std::int64_t kUnreachable = std::numeric_limits<std::int64_t>::max() / 4;

std::int64_t round_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

// Least common multiple, or kUnreachable where it is beyond any buffer.
std::int64_t lcm_capped(std::int64_t a, std::int64_t b) {
  const std::int64_t factor = b / std::gcd(a, b);
  return a > kUnreachable / factor ? kUnreachable : a * factor;
}

struct Item {
  std::int64_t numel;
  std::int64_t granule;  // elements that stay together
};

class Search {
 public:
  Search(const std::vector<ParamExtent>& params, int world_size, std::int64_t align)
      : world_(world_size), align_(align) {
    for (const ParamExtent& p : params) {
      const std::int64_t numel = p.rows * p.row_elements;
      const std::int64_t granule = std::min(p.granule_rows, p.rows) * p.row_elements;
      items_.push_back({numel, std::max<std::int64_t>(granule, 1)});
      total_ += round_up(numel, align);
    }
    in_order_.resize(items_.size());
    std::iota(in_order_.begin(), in_order_.end(), 0);
    large_first_ = in_order_;
    std::stable_sort(
        large_first_.begin(), large_first_.end(),
        [this](std::size_t a, std::size_t b) { return items_[a].numel > items_[b].numel; });
  }

  LayoutResult run() {
    const std::int64_t last = common_multiple_shard();
    std::int64_t shard = lower_bound();
    for (std::int64_t tried = 0; shard < last; ++tried) {
      const std::int64_t step = forced_multiple(shard);
      // Where a forced parameter becomes short enough to span one boundary only, it forces nothing
      // any more.
      const std::int64_t candidate = std::min(round_up(shard, step), next_threshold(shard));
      if (candidate >= last) break;
      if (candidate % forced_multiple(candidate) == 0 && place_any(candidate)) {
        return result(candidate);
      }
      // Fine steps at first; coarser ones later bound the time for units of many parameters.
      const std::int64_t work = tried * static_cast<std::int64_t>(items_.size());
      shard = candidate + align_ * (1 + work / kFineSteps);
    }
    place_any(last);
    return result(last);
  }

 private:
  static constexpr std::int64_t kFineSteps = 20000;

  // All shards together hold everything, and each holds the largest granule.
  std::int64_t lower_bound() const {
    std::int64_t shard = (total_ + world_ - 1) / world_;
    for (const Item& item : items_) shard = std::max(shard, item.granule);
    return std::max(round_up(shard, align_), align_);
  }

  // The first multiple of all granules that works: the method to beat. Where they have no usable
  // common multiple, everything on one rank.
  std::int64_t common_multiple_shard() {
    std::int64_t multiple = align_;
    for (const Item& item : items_) multiple = lcm_capped(multiple, item.granule);
    const std::int64_t everything = std::max(round_up(total_, align_), align_);
    if (multiple >= everything) return everything;
    for (std::int64_t shard = round_up(lower_bound(), multiple); shard < everything;
         shard += multiple) {
      if (place_any(shard)) return shard;
    }
    return everything;
  }

  // What `shard` must be a multiple of: the granules of parameters so long that they span two
  // boundaries or more.
  std::int64_t forced_multiple(std::int64_t shard) const {
    std::int64_t multiple = align_;
    for (const Item& item : items_) {
      if (item.numel > 2 * shard) multiple = lcm_capped(multiple, item.granule);
    }
    return multiple;
  }

  std::int64_t next_threshold(std::int64_t shard) const {
    std::int64_t threshold = kUnreachable;
    for (const Item& item : items_) {
      if (item.numel > 2 * shard) {
        threshold = std::min(threshold, round_up((item.numel + 1) / 2, align_));
      }
    }
    return threshold;
  }

  bool place_any(std::int64_t shard) {
    return place(shard, in_order_) || place(shard, large_first_);
  }

  struct Gap {
    std::int64_t start;
    std::int64_t stop;
  };

  // Puts the parameters one after the other, each as early as no boundary cuts a granule. What
  // stays open in front of one is offered to those after it.
  bool place(std::int64_t shard, const std::vector<std::size_t>& order) {
    offsets_.assign(items_.size(), 0);
    std::vector<Gap> gaps;
    std::int64_t cursor = 0;
    for (const std::size_t index : order) {
      const Item& item = items_[index];
      if (item.numel == 0 || take_gap(gaps, item, shard, offsets_[index])) continue;
      const std::int64_t offset = first_fit(item, cursor, shard);
      if (offset < 0 || offset + item.numel > shard * world_) return false;
      if (offset > cursor) gaps.push_back({cursor, offset});
      offsets_[index] = offset;
      cursor = round_up(offset + item.numel, align_);
    }
    return true;
  }

  bool take_gap(std::vector<Gap>& gaps, const Item& item, std::int64_t shard,
                std::int64_t& offset) const {
    for (Gap& gap : gaps) {
      if (item.numel > gap.stop - gap.start) continue;
      const std::int64_t fit = first_fit(item, gap.start, shard);
      if (fit < 0 || fit + item.numel > gap.stop) continue;
      offset = fit;
      gap.start = round_up(fit + item.numel, align_);
      return true;
    }
    return false;
  }

  // The first aligned offset from `cursor` on at which no boundary falls inside a granule; -1 if
  // there is none.
  std::int64_t first_fit(const Item& item, std::int64_t cursor, std::int64_t shard) const {
    const std::int64_t boundary = (cursor / shard + 1) * shard;
    if (cursor + item.numel <= boundary) return cursor;
    // To cross a boundary, the distance to it must be made of granules, and keep the start aligned.
    const std::int64_t unit = lcm_capped(item.granule, align_);
    const std::int64_t here = (boundary - cursor) / unit * unit;
    if (here > 0 && is_valid(item, boundary - here, shard)) return boundary - here;
    if (is_valid(item, boundary, shard)) return boundary;
    const std::int64_t next = shard / unit * unit;
    if (next > 0 && is_valid(item, boundary + shard - next, shard)) return boundary + shard - next;
    return -1;
  }

  bool is_valid(const Item& item, std::int64_t offset, std::int64_t shard) const {
    const std::int64_t boundary = (offset / shard + 1) * shard;
    const std::int64_t end = offset + item.numel;
    if (end <= boundary) return true;
    if ((boundary - offset) % item.granule != 0) return false;
    return end <= boundary + shard || shard % item.granule == 0;
  }

  LayoutResult result(std::int64_t shard) const {
    LayoutResult result;
    result.shard_elements = shard;
    result.offsets = offsets_;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const std::int64_t boundary = (offsets_[i] / shard + 1) * shard;
      const bool several = offsets_[i] + items_[i].numel > boundary + shard;
      if (several && items_[i].granule > 1) {
        result.forced_by.push_back(static_cast<std::int32_t>(i));
      }
    }
    return result;
  }

  std::int64_t world_;
  std::int64_t align_;
  std::int64_t total_ = 0;
  std::vector<Item> items_;
  std::vector<std::size_t> in_order_;
  std::vector<std::size_t> large_first_;
  std::vector<std::int64_t> offsets_;
};

}  // namespace

LayoutResult plan_layout(const std::vector<ParamExtent>& params, int world_size,
                         std::int64_t align_elements) {
  if (world_size < 1) {
    throw std::invalid_argument("layout: world_size is " + std::to_string(world_size) +
                                "; it must be at least 1");
  }
  if (align_elements < 1) {
    throw std::invalid_argument("layout: align_elements is " + std::to_string(align_elements) +
                                "; it must be at least 1");
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i].rows < 0 || params[i].row_elements < 0 || params[i].granule_rows < 1) {
      throw std::invalid_argument("layout: parameter " + std::to_string(i) +
                                  " has a negative size, or a granule of no rows");
    }
  }
  return Search(params, world_size, align_elements).run();
}

}  // namespace shardcomm
