// Schedules, in C. They are planned in Python (shardcomm.Schedule.plan), and travel as JSON.
#include <climits>
#include <cstddef>
#include <map>
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

using shardcomm::abi::checked;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over;
using shardcomm::abi::int_in;
using shardcomm::abi::Json;
using shardcomm::abi::required;

struct shc_schedule : shardcomm::abi::Handle<shardcomm::abi::Kind::schedule> {
  std::vector<int> slot_of;
  int slots = 0;
  std::map<std::pair<int, int>, std::vector<shc_action>> actions;  // by phase and unit
};

namespace {

constexpr int kScheduleFormat = 1;

// In the order of shc_phase and shc_verb. Functions that run when the process ends may still parse.
constexpr const char* kPhases[] = {"pre_forward", "post_forward", "pre_backward", "post_backward",
                                   "end_of_backward"};
constexpr const char* kVerbs[] = {"gather", "wait_gather", "release",
                                  "reduce", "all_reduce",  "wait_reduce"};

template <int count>
int index_of(const char* const (&names)[count], const Json& value, const char* name) {
  const std::string& wanted = value.string(name);
  std::string accepted;
  for (int i = 0; i < count; ++i) {
    if (wanted == names[i]) return i;
    accepted += std::string(i == 0 ? "" : ", ") + names[i];
  }
  throw std::invalid_argument(std::string(name) + " is \"" + wanted + "\"; accepted: " + accepted);
}

std::unique_ptr<shc_schedule> read_schedule(const std::string& text) {
  const Json json = Json::parse(text);
  int_in(json.at("shardcomm_schedule"), "shardcomm_schedule", kScheduleFormat, kScheduleFormat);
  auto schedule = std::make_unique<shc_schedule>();
  schedule->slots = int_in(json.at("num_slots"), "num_slots", 0, INT_MAX);
  for (const Json& slot : json.at("slot_of").list("slot_of")) {
    schedule->slot_of.push_back(int_in(slot, "slot_of[i]", 0, schedule->slots - 1));
  }
  const int last_unit = static_cast<int>(schedule->slot_of.size()) - 1;
  for (const Json& entry : json.at("triggers").list("triggers")) {
    const int phase = index_of(kPhases, entry.at("phase"), "phase");
    const int unit =
        phase == SHC_END_OF_BACKWARD ? -1 : int_in(entry.at("unit"), "unit", 0, last_unit);
    auto& actions = schedule->actions[{phase, unit}];
    for (const Json& action : entry.at("actions").list("actions")) {
      const Json::List& fields = action.list("actions[i]");
      if (fields.size() != 3) throw std::invalid_argument("actions[i] must be [verb, unit, slot]");
      actions.push_back({static_cast<shc_verb>(index_of(kVerbs, fields[0], "verb")),
                         int_in(fields[1], "actions[i][1]", 0, last_unit),
                         int_in(fields[2], "actions[i][2]", -1, schedule->slots - 1)});
    }
  }
  return schedule;
}

}  // namespace

shc_status shc_schedule_parse(const char* json, shc_schedule** schedule) {
  return guarded("shc_schedule_parse", [&] {
    shc_schedule*& result = required(schedule, "schedule");
    hand_over(result, read_schedule(&required(json, "json")));
  });
}

void shc_schedule_destroy(shc_schedule* schedule) { shardcomm::abi::destroy(schedule); }

shc_status shc_schedule_unit_count(const shc_schedule* schedule, size_t* count) {
  return guarded("shc_schedule_unit_count",
                 [&] { required(count, "count") = checked(schedule, "schedule").slot_of.size(); });
}

shc_status shc_schedule_slot_count(const shc_schedule* schedule, size_t* count) {
  return guarded("shc_schedule_slot_count", [&] {
    required(count, "count") = static_cast<size_t>(checked(schedule, "schedule").slots);
  });
}

shc_status shc_schedule_slot_of(const shc_schedule* schedule, size_t unit, int* slot) {
  return guarded("shc_schedule_slot_of", [&] {
    const std::vector<int>& slots = checked(schedule, "schedule").slot_of;
    if (unit >= slots.size()) {
      throw std::invalid_argument("unit is " + std::to_string(unit) + "; the schedule has " +
                                  std::to_string(slots.size()) + " units, counted from 0");
    }
    required(slot, "slot") = slots[unit];
  });
}

shc_status shc_schedule_actions(const shc_schedule* schedule, shc_phase phase, int unit,
                                const shc_action** actions, size_t* count) {
  return guarded("shc_schedule_actions", [&] {
    const shc_schedule& known = checked(schedule, "schedule");
    const shc_action*& first = required(actions, "actions");
    size_t& length = required(count, "count");
    const int units = static_cast<int>(known.slot_of.size());
    if (phase < SHC_PRE_FORWARD || phase > SHC_END_OF_BACKWARD) {
      throw std::invalid_argument("phase is " + std::to_string(static_cast<int>(phase)) +
                                  "; it must be an shc_phase");
    }
    if (phase == SHC_END_OF_BACKWARD ? unit != -1 : unit < 0 || unit >= units) {
      throw std::invalid_argument("unit is " + std::to_string(unit) + "; it must be 0 to " +
                                  std::to_string(units - 1) + ", and -1 for SHC_END_OF_BACKWARD");
    }
    const auto found = known.actions.find({phase, unit});
    const bool none = found == known.actions.end();
    first = none ? nullptr : found->second.data();
    length = none ? 0 : found->second.size();
  });
}
