// Layouts, in C.
#include "shardcomm/layout.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/json.h"
#include "abi/status.h"
#include "shardcomm.h"

using shardcomm::ParamExtent;
using shardcomm::abi::checked;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over;
using shardcomm::abi::Json;
using shardcomm::abi::required;

namespace {

constexpr int kLayoutFormat = 1;

std::size_t checked_param(const shc_layout& layout, std::size_t param) {
  if (param < layout.params.size()) return param;
  throw std::invalid_argument("param is " + std::to_string(param) + "; the layout has " +
                              std::to_string(layout.params.size()) + " parameters, counted from 0");
}

// The plan is part of the text, so that all who read it agree, whatever their versions search.
std::string as_json(const shc_layout& layout) {
  std::string text = "{\"shardcomm_layout\": " + std::to_string(kLayoutFormat) +
                     ", \"world_size\": " + std::to_string(layout.world_size) +
                     ", \"align_elements\": " + std::to_string(layout.align_elements) +
                     ", \"shard_elements\": " + std::to_string(layout.plan.shard_elements) +
                     ", \"params\": [";
  for (std::size_t i = 0; i < layout.params.size(); ++i) {
    const ParamExtent& param = layout.params[i];
    text += std::string(i == 0 ? "" : ", ") + "[" + std::to_string(param.rows) + ", " +
            std::to_string(param.row_elements) + ", " + std::to_string(param.granule_rows) + ", " +
            std::to_string(layout.plan.offsets[i]) + "]";
  }
  return text + "]}";
}

// Whether no shard ends within a granule of the parameter.
bool keeps_granules(const ParamExtent& param, std::int64_t offset, std::int64_t shard) {
  const std::int64_t end = offset + param.rows * param.row_elements;
  const std::int64_t first_cut = shard == 0 ? end : (offset / shard + 1) * shard;
  if (first_cut >= end) return true;
  if (param.granule_rows > (end - offset) / param.row_elements) return false;  // one granule
  const std::int64_t granule = param.granule_rows * param.row_elements;
  const bool again = shard < end - first_cut;
  return (first_cut - offset) % granule == 0 && (!again || shard % granule == 0);
}

// Refuses a plan that does not hold its parameters as they ask for.
void check_plan(const shc_layout& layout) {
  const std::int64_t flat = layout.world_size * layout.plan.shard_elements;
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (std::size_t i = 0; i < layout.params.size(); ++i) {
    const ParamExtent& param = layout.params[i];
    const std::int64_t offset = layout.plan.offsets[i];
    ranges.emplace_back(offset, param.rows * param.row_elements);
    if (offset % layout.align_elements == 0 &&
        keeps_granules(param, offset, layout.plan.shard_elements)) {
      continue;
    }
    throw std::invalid_argument("the text is no layout: params[" + std::to_string(i) +
                                "] is not aligned, or a shard ends within one of its granules");
  }
  std::sort(ranges.begin(), ranges.end());
  std::int64_t end = 0;
  for (const auto& [begin, count] : ranges) {
    if (count == 0) continue;
    if (begin < end || count > flat - begin) {
      throw std::invalid_argument(
          "the text is no layout: parameters overlap, or end after the "
          "last shard");
    }
    end = begin + count;
  }
}

std::unique_ptr<shc_layout> read_layout(const std::string& text) {
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  const auto number = [](const Json& value, const std::string& name, std::int64_t least) {
    const std::int64_t read = value.number(name);
    if (read >= least && read <= kMost) return read;
    throw std::invalid_argument(name + " is " + std::to_string(read) + "; it must be " +
                                std::to_string(least) + " to 2^60");
  };
  const Json json = Json::parse(text);
  int_in(json.at("shardcomm_layout"), "shardcomm_layout", kLayoutFormat, kLayoutFormat);
  const int world_size = int_in(json.at("world_size"), "world_size", 1, INT_MAX);
  shardcomm::LayoutResult plan;
  plan.shard_elements = number(json.at("shard_elements"), "shard_elements", 0);
  if (plan.shard_elements > kMost / world_size) {
    throw std::invalid_argument("the text is no layout: its shards have more than 2^60 elements");
  }
  std::vector<ParamExtent> params;
  for (const Json& entry : json.at("params").list("params")) {
    const Json::List& fields = entry.list("params[i]");
    if (fields.size() != 4) throw std::invalid_argument("params[i] must have 4 numbers");
    params.push_back({number(fields[0], "params[i][0]", 0), number(fields[1], "params[i][1]", 0),
                      number(fields[2], "params[i][2]", 1)});
    if (params.back().row_elements > 0 && params.back().rows > kMost / params.back().row_elements) {
      throw std::invalid_argument("params[i] has more than 2^60 elements");
    }
    plan.offsets.push_back(number(fields[3], "params[i][3]", 0));
  }
  auto layout = std::make_unique<shc_layout>(std::move(params), world_size,
                                             number(json.at("align_elements"), "align_elements", 1),
                                             std::move(plan));
  check_plan(*layout);
  return layout;
}

}  // namespace

shc_status shc_layout_plan(const shc_param* params, size_t count, int world_size,
                           int64_t align_elements, shc_layout** layout) {
  return guarded("shc_layout_plan", [&] {
    shc_layout*& result = required(layout, "layout");
    if (count > 0) required(params, "params");
    std::vector<ParamExtent> extents;
    extents.reserve(count);
    std::transform(params, params + count, std::back_inserter(extents), [](const shc_param& p) {
      return ParamExtent{p.rows, p.row_elements, p.granule_rows};
    });
    auto plan = shardcomm::plan_layout(extents, world_size, align_elements);
    hand_over(result, std::make_unique<shc_layout>(std::move(extents), world_size, align_elements,
                                                   std::move(plan)));
  });
}

void shc_layout_destroy(shc_layout* layout) { shardcomm::abi::destroy(layout); }

shc_status shc_layout_param_count(const shc_layout* layout, size_t* count) {
  return guarded("shc_layout_param_count",
                 [&] { required(count, "count") = checked(layout, "layout").params.size(); });
}

shc_status shc_layout_world_size(const shc_layout* layout, int* world_size) {
  return guarded("shc_layout_world_size", [&] {
    required(world_size, "world_size") = checked(layout, "layout").world_size;
  });
}

shc_status shc_layout_shard_elements(const shc_layout* layout, int64_t* elements) {
  return guarded("shc_layout_shard_elements", [&] {
    required(elements, "elements") = checked(layout, "layout").plan.shard_elements;
  });
}

shc_status shc_layout_offset(const shc_layout* layout, size_t param, int64_t* offset) {
  return guarded("shc_layout_offset", [&] {
    const shc_layout& known = checked(layout, "layout");
    required(offset, "offset") = known.plan.offsets[checked_param(known, param)];
  });
}

shc_status shc_layout_piece(const shc_layout* layout, size_t param, int rank, shc_piece* piece) {
  return guarded("shc_layout_piece", [&] {
    const shc_layout& known = checked(layout, "layout");
    if (rank < 0 || rank >= known.world_size) {
      throw std::invalid_argument("rank is " + std::to_string(rank) + "; it must be 0 to " +
                                  std::to_string(known.world_size - 1));
    }
    const ParamExtent& extent = known.params[checked_param(known, param)];
    const std::int64_t first = known.plan.offsets[param];
    const std::int64_t shard = rank * known.plan.shard_elements;
    const std::int64_t begin = std::max(first, shard);
    const std::int64_t end =
        std::min(first + extent.rows * extent.row_elements, shard + known.plan.shard_elements);
    shc_piece& result = required(piece, "piece");
    result = {0, 0, 0};
    if (begin < end) result = {begin - first, begin - shard, end - begin};
  });
}

shc_status shc_layout_serialize(const shc_layout* layout, char* text, size_t* bytes) {
  return guarded("shc_layout_serialize", [&] {
    const std::string json = as_json(checked(layout, "layout"));
    const size_t room = std::exchange(required(bytes, "bytes"), json.size() + 1);
    if (text == nullptr) return;
    if (room < json.size() + 1) {
      throw std::invalid_argument("*bytes is " + std::to_string(room) + "; the text needs " +
                                  std::to_string(json.size() + 1));
    }
    text[json.copy(text, json.size())] = '\0';
  });
}

shc_status shc_layout_deserialize(const char* text, shc_layout** layout) {
  return guarded("shc_layout_deserialize", [&] {
    shc_layout*& result = required(layout, "layout");
    hand_over(result, read_layout(&required(text, "text")));
  });
}
