// Block formats from C: encoded at once, decoded and summed on a stream.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

enum { kWireBytes = 384 };
static unsigned char wires[2 * kWireBytes] __attribute__((aligned(128)));

static void encode_and_decode(void) {
  const shc_block_format format = {SHC_MXINT8, 32, SHC_NEAREST};
  int64_t bytes = 0;
  ok(shc_wire_bytes(&format, 300, &bytes));
  require(bytes == kWireBytes, "ten blocks of 32 codes and a scale, rounded up to 128 bytes");

  float numbers[300];
  for (int i = 0; i < 300; ++i) numbers[i] = 0.01f * (float)(i - 150);
  const shc_encoded_segment whole = {numbers, 300, 0};
  shc_block_stats stats = {0, 0, 0};
  for (int part = 0; part < 2; ++part) {
    ok(shc_encode(&format, &whole, 1, SHC_F32, wires + part * kWireBytes, kWireBytes, 0, &stats, 1,
                  SHC_HOST, NULL));
  }
  require(stats.bound == 0x1p-7f, "half a step of the largest block");
  require(stats.seen > 0 && stats.seen <= stats.bound, "the largest difference is within it");
  require(stats.flagged == 0, "all numbers are finite");

  shc_stream* stream = NULL;
  shc_event* end = NULL;
  ok(shc_stream_create_thread(&stream));
  float tail[44];
  const shc_decoded_segment behind = {tail, 44, 8};
  ok(shc_decode(&format, wires, kWireBytes, &behind, 1, SHC_F32, 1, SHC_HOST, stream));
  float sum[300];
  shc_copy_options half = SHC_COPY_OPTIONS_INIT;
  half.scale = 0.5f;
  ok(shc_decode_sum(&format, wires, 2, sum, 300, SHC_F32, &half, 2, SHC_HOST, stream));
  ok(shc_stream_record(stream, &end));
  ok(shc_event_wait(end, 60));
  for (int i = 0; i < 300; ++i) {
    require(fabsf(sum[i] - numbers[i]) <= stats.bound, "the mean of two equal parts is a part");
    require(i < 256 || tail[i - 256] == sum[i], "a segment begins at its block");
  }
  shc_event_destroy(end);
  shc_stream_destroy(stream);

  numbers[70] = NAN;
  ok(shc_encode(&format, &whole, 1, SHC_F32, wires, kWireBytes, 0, &stats, 1, SHC_HOST, NULL));
  require(stats.flagged == 1, "the block of a NaN is flagged");
  int32_t nonfinite = 0;
  half.nonfinite = &nonfinite;
  ok(shc_decode_sum(&format, wires, 2, sum, 300, SHC_F32, &half, 1, SHC_HOST, NULL));
  require(nonfinite == 1 && isnan(sum[64]) && isnan(sum[95]), "all of it decodes to NaN");
  require(!isnan(sum[63]) && !isnan(sum[96]), "and no other block");
}

static void refuse(void) {
  const shc_block_format format = {SHC_MXFP8, 64, SHC_STOCHASTIC};
  const shc_block_format odd = {SHC_MXFP8, 48, SHC_NEAREST};
  const shc_block_format no_code = {(shc_block_code)2, 32, SHC_NEAREST};
  const shc_block_format no_rounding = {SHC_MXFP8, 32, (shc_rounding)2};
  float numbers[200];
  int64_t bytes = 0;
  refused(shc_wire_bytes(NULL, 1, &bytes), SHC_INVALID_ARGUMENT, "format is NULL");
  refused(shc_wire_bytes(&odd, 1, &bytes), SHC_INVALID_ARGUMENT, "block is 48; accepted: 32");
  refused(shc_wire_bytes(&no_code, 1, &bytes), SHC_INVALID_ARGUMENT, "format.code is 2");
  refused(shc_wire_bytes(&no_rounding, 1, &bytes), SHC_INVALID_ARGUMENT, "format.rounding is 2");
  refused(shc_wire_bytes(&format, -1, &bytes), SHC_INVALID_ARGUMENT, "elements is -1");
  refused(shc_wire_bytes(&format, INT64_MAX, &bytes), SHC_INVALID_ARGUMENT, "63 bits");
  refused(shc_wire_bytes(&format, 1, NULL), SHC_INVALID_ARGUMENT, "bytes is NULL");

  const shc_encoded_segment twice[2] = {{numbers, 100, 0}, {numbers, 100, 1}};
  refused(shc_encode(&format, twice, 2, SHC_F32, wires, kWireBytes, 0, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "segments overlap at block 1");
  refused(shc_encode(&format, NULL, 2, SHC_F32, wires, kWireBytes, 0, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "segments is NULL");
  refused(shc_encode(&format, twice, 1, SHC_I32, wires, kWireBytes, 0, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "dtype is i32");
  refused(shc_encode(&format, twice, 1, SHC_F32, NULL, kWireBytes, 0, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "wire is NULL");
  refused(shc_encode(&format, twice, 1, SHC_F32, wires, 100, 0, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "has 100 bytes");
  refused(shc_encode(&format, twice, 1, SHC_F32, wires, kWireBytes, 0, NULL, 0, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "threads is 0");
  refused(shc_encode(&format, twice, 1, SHC_F32, wires, kWireBytes, 0, NULL, 1, -2, NULL),
          SHC_INVALID_ARGUMENT, "device is -2");
  const shc_encoded_segment nowhere[2] = {{numbers, 64, 0}, {NULL, 64, 1}};
  refused(shc_encode(&format, nowhere, 2, SHC_F32, wires, kWireBytes, 0, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "segments[1].src is NULL");
  const shc_decoded_segment outside = {numbers, 200, 3};
  refused(shc_decode(&format, wires, kWireBytes, &outside, 1, SHC_F32, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "segments[0] has 200 elements from block 3 on");
  const shc_decoded_segment to_nowhere = {NULL, 64, 0};
  refused(shc_decode(&format, wires, kWireBytes, &to_nowhere, 1, SHC_F32, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "segments[0].dst is NULL");
  refused(shc_decode_sum(&format, wires, 0, numbers, 9, SHC_F32, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "parts is 0");
  refused(shc_decode_sum(&format, NULL, 1, numbers, 9, SHC_F32, NULL, 1, SHC_HOST, NULL),
          SHC_INVALID_ARGUMENT, "wires is NULL");
}

int main(void) {
  encode_and_decode();
  refuse();
  return 0;
}
