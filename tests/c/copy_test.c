// Copy plans from C: compiled, bound, and run at once and on a stream.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

// Two sources into one destination: a 2 x 3 rectangle out of rows of 4, and zeros behind it.
static const shc_segment kSegments[] = {
    {0, 0, 1, 4, 0, 3, 2, 3},
    {1, 0, 0, 2, 6, 2, 1, 2},
    {SHC_ZEROS, 0, 0, 0, 8, 2, 1, 2},
};

static void copy_rectangles(void) {
  shc_copy_plan* plan = NULL;
  ok(shc_copy_plan_create(kSegments, 3, SHC_F32, SHC_F32, &plan));
  size_t from = 0;
  size_t to = 0;
  ok(shc_copy_plan_operands(plan, &from, &to));
  require(from == 2 && to == 1, "two sources, one destination");
  int64_t needed[3];
  ok(shc_copy_plan_extents(plan, needed, needed + 2));
  require(needed[0] == 8 && needed[1] == 2 && needed[2] == 10, "what each must have");

  const float a[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  const float b[2] = {8, 9};
  float result[10];
  memset(result, 0xff, sizeof(result));
  const void* sources[] = {a, b};
  void* destinations[] = {result};
  shc_copy* copy = NULL;
  ok(shc_copy_bind(plan, sources, destinations, 2, SHC_HOST, &copy));
  shc_copy_plan_destroy(plan);  // the copy keeps it
  ok(shc_copy_run(copy, NULL, NULL));
  const float wanted[10] = {1, 2, 3, 5, 6, 7, 8, 9, 0, 0};
  require(memcmp(result, wanted, sizeof(wanted)) == 0, "every element is where it belongs");

  shc_copy_options options = SHC_COPY_OPTIONS_INIT;
  options.scale = 2;
  options.accumulate = 1;
  shc_stream* stream = NULL;
  shc_event* end = NULL;
  ok(shc_stream_create_thread(&stream));
  ok(shc_copy_run(copy, &options, stream));
  ok(shc_stream_record(stream, &end));
  ok(shc_event_wait(end, 60));
  for (int i = 0; i < 10; ++i) require(result[i] == 3 * wanted[i], "scaled and added");
  shc_event_destroy(end);
  shc_stream_destroy(stream);
  shc_copy_destroy(copy);
}

static void convert_and_look(void) {
  const shc_segment whole = {0, 0, 0, 4, 0, 4, 1, 4};
  shc_copy_plan* plan = NULL;
  shc_copy* copy = NULL;
  ok(shc_copy_plan_create(&whole, 1, SHC_F32, SHC_BF16, &plan));
  float numbers[4] = {1, -2, 0.5f, 3};
  uint16_t result[4];
  const void* sources[] = {numbers};
  void* destinations[] = {result};
  ok(shc_copy_bind(plan, sources, destinations, 1, SHC_HOST, &copy));
  int32_t nonfinite = 0;
  shc_copy_options options = SHC_COPY_OPTIONS_INIT;
  options.nonfinite = &nonfinite;
  ok(shc_copy_run(copy, &options, NULL));
  require(result[0] == 0x3f80 && result[1] == 0xc000 && nonfinite == 0, "bfloat16");
  numbers[3] = NAN;
  ok(shc_copy_run(copy, &options, NULL));
  require(nonfinite == 1, "a NaN is seen");
  shc_copy_destroy(copy);
  shc_copy_plan_destroy(plan);
}

static void refuse_what_does_not_fit(void) {
  shc_copy_plan* plan = NULL;
  shc_copy* copy = NULL;
  const shc_segment short_pitch = {0, 0, 0, 2, 0, 4, 2, 4};
  const shc_segment whole = {0, 0, 0, 4, 0, 4, 1, 4};
  refused(shc_copy_plan_create(&short_pitch, 1, SHC_F32, SHC_F32, &plan), SHC_INVALID_ARGUMENT,
          "pitch");
  refused(shc_copy_plan_create(&whole, 1, SHC_I32, SHC_F32, &plan), SHC_INVALID_ARGUMENT, "i32");
  refused(shc_copy_plan_create(&whole, 1, SHC_F32, (shc_dtype)-1, &plan), SHC_INVALID_ARGUMENT,
          "dst_dtype is -1");
  refused(shc_copy_plan_create(NULL, 1, SHC_F32, SHC_F32, &plan), SHC_INVALID_ARGUMENT,
          "segments is NULL");
  // What would take all memory, and what overflows.
  const shc_segment many_sources = {INT32_MAX, 0, 0, 4, 0, 4, 1, 4};
  const shc_segment many_destinations = {0, INT32_MAX, 0, 4, 0, 4, 1, 4};
  refused(shc_copy_plan_create(&many_sources, 1, SHC_F32, SHC_F32, &plan), SHC_INVALID_ARGUMENT,
          "src is 2147483647, it must be below 1048576");
  refused(shc_copy_plan_create(&many_destinations, 1, SHC_F32, SHC_F32, &plan),
          SHC_INVALID_ARGUMENT, "dst is 2147483647, it must be below 1048576");
  const int64_t most = INT64_C(1) << 60;
  const shc_segment huge[2] = {{SHC_ZEROS, 0, 0, 0, 0, most, 1, most}, {0, 1, 0, 4, 0, 4, 1, 4}};
  refused(shc_copy_plan_create(huge, 2, SHC_F32, SHC_F32, &plan), SHC_INVALID_ARGUMENT,
          "segment 1: the segments up to this one have more than 2^60 elements");
#ifndef SANITIZED  // a sanitizer ends the process
  refused(shc_copy_plan_create(huge, 1, SHC_F32, SHC_F32, &plan), SHC_OUT_OF_MEMORY,
          "shc_copy_plan_create: out of memory");
#endif
  refused(shc_copy_plan_create(&whole, SIZE_MAX, SHC_F32, SHC_F32, &plan), SHC_OUT_OF_MEMORY,
          "shc_copy_plan_create: out of memory");
  ok(shc_copy_plan_create(&whole, 1, SHC_U8, SHC_U8, &plan));
  char bytes[4] = {1, 2, 3, 4};
  const void* sources[] = {bytes};
  void* nowhere[] = {NULL};
  void* destinations[] = {bytes};
  refused(shc_copy_bind(plan, sources, nowhere, 1, SHC_HOST, &copy), SHC_INVALID_ARGUMENT, "null");
  refused(shc_copy_bind(plan, sources, destinations, 0, SHC_HOST, &copy), SHC_INVALID_ARGUMENT,
          "threads");
  refused(shc_copy_bind(plan, sources, destinations, 1, -2, &copy), SHC_INVALID_ARGUMENT,
          "device is -2");
  require(copy == NULL, "no handle where there is an error");
  char result[4];
  destinations[0] = result;
  ok(shc_copy_bind(plan, sources, destinations, 1, SHC_HOST, &copy));
  shc_copy_options options = SHC_COPY_OPTIONS_INIT;
  options.scale = 2;
  refused(shc_copy_run(copy, &options, NULL), SHC_INVALID_ARGUMENT, "scale");
  ok(shc_copy_run(copy, NULL, NULL));
  require(memcmp(result, bytes, sizeof(bytes)) == 0, "bytes are moved as they are");
  shc_copy_destroy(copy);
  shc_copy_plan_destroy(plan);
}

static void refuse_what_is_not_aligned(void) {
  const shc_segment whole = {0, 0, 0, 4, 0, 4, 1, 4};
  shc_copy_plan* plan = NULL;
  shc_copy* copy = NULL;
  ok(shc_copy_plan_create(&whole, 1, SHC_F32, SHC_BF16, &plan));
  float numbers[5] = {0};
  uint16_t result[5];
  const void* sources[] = {numbers};
  void* destinations[] = {(char*)result + 1};
  refused(shc_copy_bind(plan, sources, destinations, 1, SHC_HOST, &copy), SHC_INVALID_ARGUMENT,
          "shc_copy_bind: destination 0 begins at an address that is no multiple of 2, the size of "
          "an element of bf16");
  sources[0] = (char*)numbers + 2;
  destinations[0] = result;
  refused(shc_copy_bind(plan, sources, destinations, 1, SHC_HOST, &copy), SHC_INVALID_ARGUMENT,
          "source 0 begins at an address that is no multiple of 4, the size of an element of f32; "
          "copy it to memory that is aligned");
  require(copy == NULL, "no handle where there is an error");
  sources[0] = NULL;
  ok(shc_copy_bind(plan, sources, destinations, 1, SHC_HOST, &copy));
  shc_copy_destroy(copy);
  shc_copy_plan_destroy(plan);
}

int main(void) {
  copy_rectangles();
  convert_and_look();
  refuse_what_does_not_fit();
  refuse_what_is_not_aligned();
  return 0;
}
