// Layouts from C: planned, asked, written and read.
#include <stdlib.h>
#include <string.h>

#include "check.h"

// The example of shardcomm/layout/layout.py: a of 4 rows x 6 elements, b of 5 x 4, over 2 ranks.
static const shc_param kParams[] = {{4, 6, 1}, {5, 4, 1}};

static void require_the_example(const shc_layout* layout) {
  int64_t shard = 0;
  int64_t offset = -1;
  size_t params = 0;
  int ranks = 0;
  ok(shc_layout_shard_elements(layout, &shard));
  require(shard == 24, "the smallest shard that cuts no row");
  ok(shc_layout_param_count(layout, &params));
  ok(shc_layout_world_size(layout, &ranks));
  require(params == 2 && ranks == 2, "as it was planned");
  int64_t held = 0;
  for (int rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < 2; ++i) {
      shc_piece piece;
      ok(shc_layout_piece(layout, i, rank, &piece));
      ok(shc_layout_offset(layout, i, &offset));
      held += piece.count;
      if (piece.count == 0) continue;
      require(offset + piece.param_begin == rank * shard + piece.shard_begin,
              "a piece is one place of the flat buffer");
      require(piece.count % kParams[i].row_elements == 0, "whole rows");
      require(piece.shard_begin + piece.count <= shard, "in the shard");
    }
  }
  require(held == 4 * 6 + 5 * 4, "every element is on one rank");
}

static void plan_and_read_again(void) {
  shc_layout* layout = NULL;
  shc_layout* again = NULL;
  ok(shc_layout_plan(kParams, 2, 2, 1, &layout));
  require_the_example(layout);

  size_t bytes = 0;
  ok(shc_layout_serialize(layout, NULL, &bytes));
  char* text = malloc(bytes);
  size_t too_few = bytes - 1;
  refused(shc_layout_serialize(layout, text, &too_few), SHC_INVALID_ARGUMENT, "the text needs");
  require(too_few == bytes, "it tells what it needs");
  ok(shc_layout_serialize(layout, text, &bytes));
  require(strlen(text) + 1 == bytes, "a 0 is at its end");
  ok(shc_layout_deserialize(text, &again));
  require_the_example(again);
  free(text);
  shc_layout_destroy(layout);
  shc_layout_destroy(again);
}

static void a_parameter_of_three_ranks(void) {
  const shc_param rows = {10, 3, 1};
  shc_layout* layout = NULL;
  ok(shc_layout_plan(&rows, 1, 3, 1, &layout));
  int64_t next = 0;
  for (int rank = 0; rank < 3; ++rank) {
    shc_piece piece;
    ok(shc_layout_piece(layout, 0, rank, &piece));
    require(piece.param_begin == next && piece.count > 0, "each rank has the rows that come next");
    next += piece.count;
  }
  require(next == 30, "all of them");
  shc_layout_destroy(layout);
}

static void refuse_what_is_none(void) {
  shc_layout* layout = NULL;
  refused(shc_layout_plan(NULL, 2, 2, 1, &layout), SHC_INVALID_ARGUMENT, "params is NULL");
  refused(shc_layout_plan(kParams, 2, 0, 1, &layout), SHC_INVALID_ARGUMENT, "world_size");
  refused(shc_layout_plan(kParams, 2, 2, 0, &layout), SHC_INVALID_ARGUMENT, "align");
  refused(shc_layout_plan(kParams, 2, 2, 1, NULL), SHC_INVALID_ARGUMENT, "layout is NULL");
  const char* texts[][2] = {
      {"", "at character 0"},
      {"[1, 2", "at character 5"},
      {"{\"shardcomm_layout\": 2}", "shardcomm_layout is 2"},
      {"{\"shardcomm_layout\": 1}", "no \"world_size\""},
      {"[[[[[[[[[[[[[[[[[[[[1", "fewer brackets"},
      {"{\"a\": 1, \"a\": 2}", "each name once"},
      {"{\"shardcomm_layout\": 1, \"world_size\": 2, \"align_elements\": 1, \"shard_elements\": 4, "
       "\"params\": [[4, 1, 1, 0], [4, 1, 1, 3]]}",
       "overlap"},
      {"{\"shardcomm_layout\": 1, \"world_size\": 2, \"align_elements\": 1, \"shard_elements\": 4, "
       "\"params\": [[9, 1, 1, 0]]}",
       "after the last shard"},
      {"{\"shardcomm_layout\": 1, \"world_size\": 2, \"align_elements\": 1, \"shard_elements\": 4, "
       "\"params\": [[4611686018427387904, 4, 1, 0]]}",
       "2^60"},
      {"{\"shardcomm_layout\": 1, \"world_size\": 2, \"align_elements\": 4, \"shard_elements\": 4, "
       "\"params\": [[2, 1, 1, 0], [2, 1, 1, 2]]}",
       "params[1] is not aligned"},
      {"{\"shardcomm_layout\": 1, \"world_size\": 2, \"align_elements\": 1, \"shard_elements\": 4, "
       "\"params\": [[2, 3, 1, 0]]}",
       "params[0] is not aligned, or a shard ends within one of its granules"},
  };
  for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); ++i) {
    refused(shc_layout_deserialize(texts[i][0], &layout), SHC_INVALID_ARGUMENT, texts[i][1]);
  }
  require(layout == NULL, "no handle where there is an error");

  ok(shc_layout_plan(kParams, 2, 2, 1, &layout));
  shc_piece piece;
  int64_t offset = 0;
  refused(shc_layout_piece(layout, 2, 0, &piece), SHC_INVALID_ARGUMENT, "param is 2");
  refused(shc_layout_piece(layout, 0, 2, &piece), SHC_INVALID_ARGUMENT, "rank is 2");
  refused(shc_layout_piece(layout, 0, 0, NULL), SHC_INVALID_ARGUMENT, "piece is NULL");
  refused(shc_layout_offset(layout, 9, &offset), SHC_INVALID_ARGUMENT, "param is 9");
  shc_layout_destroy(layout);
  shc_layout_destroy(NULL);
}

int main(void) {
  plan_and_read_again();
  a_parameter_of_three_ranks();
  refuse_what_is_none();
  return 0;
}
