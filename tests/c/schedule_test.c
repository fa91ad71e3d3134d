// Schedules from C: read, and asked for the actions of each trigger.
#include "check.h"

static const char* kText =
    "{\"shardcomm_schedule\": 1, \"num_slots\": 2, \"slot_of\": [1, 0],\n"
    " \"triggers\": [\n"
    "  {\"phase\": \"pre_forward\", \"unit\": 0, \"actions\": [[\"gather\", 0, 1], "
    "[\"wait_gather\", 0, 1]]},\n"
    "  {\"phase\": \"post_forward\", \"unit\": 1, \"actions\": [[\"release\", 1, 0]]},\n"
    "  {\"phase\": \"end_of_backward\", \"unit\": -1, \"actions\": [[\"wait_reduce\", 0, -1]]}]}";

static void read_and_ask(void) {
  shc_schedule* schedule = NULL;
  ok(shc_schedule_parse(kText, &schedule));
  size_t units = 0;
  size_t slots = 0;
  int slot = -1;
  ok(shc_schedule_unit_count(schedule, &units));
  ok(shc_schedule_slot_count(schedule, &slots));
  ok(shc_schedule_slot_of(schedule, 0, &slot));
  require(units == 2 && slots == 2 && slot == 1, "units and slots");

  const shc_action* actions = NULL;
  size_t count = 0;
  ok(shc_schedule_actions(schedule, SHC_PRE_FORWARD, 0, &actions, &count));
  require(count == 2 && actions[0].verb == SHC_VERB_GATHER && actions[0].slot == 1, "gather first");
  require(actions[1].verb == SHC_VERB_WAIT_GATHER && actions[1].unit == 0, "then wait");
  ok(shc_schedule_actions(schedule, SHC_PRE_FORWARD, 1, &actions, &count));
  require(count == 0, "a trigger without actions");
  ok(shc_schedule_actions(schedule, SHC_END_OF_BACKWARD, -1, &actions, &count));
  require(count == 1 && actions[0].verb == SHC_VERB_WAIT_REDUCE && actions[0].slot == -1,
          "the end");

  refused(shc_schedule_actions(schedule, SHC_PRE_FORWARD, 2, &actions, &count),
          SHC_INVALID_ARGUMENT, "unit is 2");
  refused(shc_schedule_actions(schedule, SHC_END_OF_BACKWARD, 0, &actions, &count),
          SHC_INVALID_ARGUMENT, "unit is 0");
  refused(shc_schedule_actions(schedule, (shc_phase)5, 0, &actions, &count), SHC_INVALID_ARGUMENT,
          "phase is 5");
  refused(shc_schedule_slot_of(schedule, 2, &slot), SHC_INVALID_ARGUMENT, "unit is 2");
  shc_schedule_destroy(schedule);
}

static void refuse_what_is_none(void) {
  const char* texts[][2] = {
      {"{", "at character 1"},
      {"{\"shardcomm_schedule\": 7}", "shardcomm_schedule is 7"},
      {"{\"shardcomm_schedule\": 1, \"num_slots\": 1, \"slot_of\": [1], \"triggers\": []}",
       "slot_of[i] is 1"},
      {"{\"shardcomm_schedule\": 1, \"num_slots\": 1, \"slot_of\": [0], \"triggers\": "
       "[{\"phase\": \"lunch\", \"unit\": 0, \"actions\": []}]}",
       "phase is \"lunch\"; accepted: pre_forward"},
      {"{\"shardcomm_schedule\": 1, \"num_slots\": 1, \"slot_of\": [0], \"triggers\": "
       "[{\"phase\": \"pre_forward\", \"unit\": 0, \"actions\": [[\"gather\", 0]]}]}",
       "[verb, unit, slot]"},
  };
  shc_schedule* schedule = NULL;
  for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); ++i) {
    refused(shc_schedule_parse(texts[i][0], &schedule), SHC_INVALID_ARGUMENT, texts[i][1]);
  }
  require(schedule == NULL, "no handle where there is an error");
}

int main(void) {
  read_and_ask();
  refuse_what_is_none();
  return 0;
}
