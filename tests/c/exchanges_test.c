// all_to_all, gather, scatter and reduce from C, on processes and on threads: called, on streams,
// bound, and refused.
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { kMostRanks = 4, kMost = 30000 };  // elements of a rank for another: few, and many

static int64_t part_of(int from, int to, int64_t count) {
  return from == to ? 1 : (from + 2 * to) % 3 * count;  // some pairs have nothing for each other
}

struct exchange {
  int64_t sent[kMostRanks];
  int64_t received[kMostRanks];
  float* send;
  float* recv;
};

static struct exchange exchange_of(const shc_comm* comm, int64_t count) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  struct exchange made = {{0}, {0}, NULL, NULL};
  made.send = calloc((size_t)(2 * count * size + 1), sizeof(float));
  made.recv = calloc((size_t)(2 * count * size + 1), sizeof(float));
  int64_t begin = 0;
  for (int r = 0; r < size; ++r) {
    made.sent[r] = part_of(rank, r, count);
    made.received[r] = part_of(r, rank, count);
    for (int64_t i = 0; i < made.sent[r]; ++i) made.send[begin++] = value_of(rank, i + r);
  }
  return made;
}

static void require_exchanged(const shc_comm* comm, struct exchange* all) {
  int64_t begin = 0;
  for (int r = 0; r < size_of(comm); ++r) {
    for (int64_t i = 0; i < all->received[r]; ++i) {
      require(all->recv[begin++] == value_of(r, i + rank_of(comm)), "what rank r sent this rank");
    }
  }
  memset(all->recv, 0, (size_t)begin * sizeof(float));
}

static void drop(struct exchange* all) {
  free(all->send);
  free(all->recv);
}

static void call_each(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  const int64_t counts[] = {0, 5, kMost};
  for (int c = 0; c < 3; ++c) {
    const int64_t count = counts[c];
    struct exchange all = exchange_of(comm, count);
    ok(shc_all_to_all(comm, all.send, all.sent, all.recv, all.received, SHC_F32, 3, NULL));
    require_exchanged(comm, &all);
    drop(&all);

    const int root = c % size;
    float* own = calloc((size_t)count + 1, sizeof(float));
    float* full = rank == root ? calloc((size_t)(count * size) + 1, sizeof(float)) : NULL;
    for (int64_t i = 0; i < count; ++i) own[i] = value_of(rank, i);
    ok(shc_gather(comm, own, full, SHC_F32, count, root, 4, NULL));
    for (int64_t i = 0; full != NULL && i < count * size; ++i) {
      require(full[i] == value_of((int)(i / count), i % count), "gathered");
      full[i] += 1;
    }
    ok(shc_scatter(comm, full, own, SHC_F32, count, root, 0, NULL));
    for (int64_t i = 0; i < count; ++i) require(own[i] == value_of(rank, i) + 1, "scattered");
    ok(shc_reduce(comm, own, full, SHC_F32, count, SHC_SUM, root, 0, NULL));
    for (int64_t i = 0; full != NULL && i < count; ++i) {
      float total = 0;
      for (int r = 0; r < size; ++r) total += value_of(r, i) + 1;
      require(full[i] == total, "reduced");
    }
    free(own);
    free(full);
  }
}

static void combine_bits_and_bytes(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  uint8_t bits[4] = {(uint8_t)(1 << rank), (uint8_t)~(1 << rank), (uint8_t)(rank + 1), 3};
  uint8_t result[4];
  int all = (1 << size) - 1, flips = 0, product = 1;
  for (int r = 1; r <= size; ++r) {
    flips ^= r;
    product *= r;
  }
  ok(shc_reduce(comm, bits, result, SHC_U8, 4, SHC_BOR, 0, 0, NULL));
  if (rank == 0) require(result[0] == all && result[3] == 3, "bits of any");
  ok(shc_reduce(comm, bits, result, SHC_U8, 4, SHC_BAND, 0, 0, NULL));
  if (rank == 0) require(result[1] == (uint8_t)~all, "bits of all");
  ok(shc_reduce(comm, bits, result, SHC_U8, 4, SHC_BXOR, 0, 0, NULL));
  if (rank == 0) require(result[2] == flips, "bits of an odd number of ranks");
  ok(shc_reduce(comm, bits, result, SHC_U8, 4, SHC_PROD, 0, 0, NULL));
  if (rank == 0) require(result[2] == product, "a product");
  int8_t least[2] = {(int8_t)(rank == 0 ? 0 : -100 - rank), (int8_t)(100 + rank)};
  ok(shc_all_reduce(comm, least, SHC_I8, 2, SHC_MIN, 0, NULL));
  require(least[0] == (size == 1 ? 0 : -99 - size) && least[1] == 100, "signed bytes");
  require(shc_dtype_size(SHC_I8) == 1 && strcmp(shc_dtype_name(SHC_I8), "i8") == 0, "i8");
  require(shc_dtype_name((shc_dtype)(SHC_I8 + 1)) == NULL, "nothing after it");
}

static void bind_each(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  struct exchange all = exchange_of(comm, 100);
  float own[50];
  float part[50];
  float full[50 * kMostRanks];
  for (int i = 0; i < 50; ++i) own[i] = value_of(rank, i);
  shc_collective* exchange = NULL;
  shc_collective* gather = NULL;
  shc_collective* scatter = NULL;
  shc_collective* reduce = NULL;
  int64_t sent[kMostRanks];
  memcpy(sent, all.sent, sizeof(sent));
  ok(shc_bind_all_to_all(comm, all.send, sent, all.recv, all.received, SHC_F32, 0, &exchange));
  memset(sent, 0, sizeof(sent));  // it was read when it was bound
  ok(shc_bind_gather(comm, own, full, SHC_F32, 50, 0, 0, &gather));
  ok(shc_bind_scatter(comm, full, part, SHC_F32, 50, 0, 0, &scatter));
  ok(shc_bind_reduce(comm, own, part, SHC_F32, 50, SHC_MAX, size - 1, 0, &reduce));
  shc_stream* stream = NULL;
  ok(shc_stream_create_thread(&stream));
  for (int round = 0; round < 4; ++round) {
    shc_stream* on = round % 2 == 0 ? NULL : stream;
    shc_event* end = NULL;
    ok(shc_start(exchange, on));
    ok(shc_start(gather, on));
    ok(shc_start(scatter, on));
    ok(shc_stream_record(stream, &end));
    ok(shc_event_wait(end, 60));
    shc_event_destroy(end);
    require_exchanged(comm, &all);
    for (int i = 0; i < 50; ++i) require(part[i] == own[i], "gathered, and scattered again");
    ok(shc_start(reduce, on));
    ok(shc_stream_record(stream, &end));
    ok(shc_event_wait(end, 60));
    shc_event_destroy(end);
    float most = value_of(0, 0);
    for (int r = 1; r < size; ++r) most = value_of(r, 0) > most ? value_of(r, 0) : most;
    if (rank == size - 1) require(part[0] == most, "the greatest");
    // The same without binding, on a stream.
    ok(shc_all_to_all(comm, all.send, all.sent, all.recv, all.received, SHC_F32, 0, stream));
    ok(shc_gather(comm, own, full, SHC_F32, 50, 0, 0, stream));
    ok(shc_scatter(comm, full, part, SHC_F32, 50, 0, 0, stream));
    ok(shc_reduce(comm, part, full, SHC_F32, 50, SHC_MAX, 0, 0, stream));
    ok(shc_stream_record(stream, &end));
    ok(shc_event_wait(end, 60));
    shc_event_destroy(end);
    require_exchanged(comm, &all);
    if (rank == 0) require(full[0] == most, "the greatest, on a stream");
  }
  shc_stream_destroy(stream);
  shc_collective_destroy(exchange);
  shc_collective_destroy(gather);
  shc_collective_destroy(scatter);
  shc_collective_destroy(reduce);
  drop(&all);
}

static void tell_their_paths(shc_comm* comm) {
  const char* const operations[] = {"all_to_all", "gather", "scatter", "reduce"};
  shc_receipt receipt = SHC_RECEIPT_INIT;
  for (int i = 0; i < 4; ++i) {
    require(shc_comm_receipt(comm, operations[i], &receipt) == SHC_NOT_READY, "none yet");
  }
  call_each(comm);
  for (int i = 0; i < 4; ++i) {
    ok(shc_comm_receipt(comm, operations[i], &receipt));
    require(strcmp(receipt.requested, "direct") == 0, "many elements");
    const int is_direct = strcmp(receipt.taken, "direct") == 0;
    require(is_direct || strcmp(receipt.taken, "staged") == 0, "the way");
    require((receipt.reason[0] == '\0') == is_direct, "and why it was another one");
  }
}

static void refuse_what_is_wrong(shc_comm* comm) {
  const int64_t two[kMostRanks] = {2, 2, 2, 2};
  const int64_t wrong[kMostRanks] = {2, -1, 2, 2};
  float a[2 * kMostRanks] = {0};
  float b[2 * kMostRanks];
  refused(shc_all_to_all(comm, a, NULL, b, two, SHC_F32, 0, NULL), SHC_INVALID_ARGUMENT,
          "shc_all_to_all: send_counts is NULL");
  refused(shc_all_to_all(comm, a, two, b, wrong, SHC_F32, 0, NULL), SHC_INVALID_ARGUMENT,
          "shc_all_to_all: recv_counts[1] is -1; counts must be at least 0");
  refused(shc_all_to_all(comm, a, two, a, two, SHC_F32, 0, NULL), SHC_INVALID_ARGUMENT,
          "send overlaps recv");
  refused(shc_all_to_all(comm, a, two, b, two, (shc_dtype)8, 0, NULL), SHC_INVALID_ARGUMENT,
          "dtype is 8; it must be an shc_dtype, SHC_U8 (0) to SHC_I8 (7)");
  refused(shc_gather(comm, a, b, SHC_F32, 1, -1, 0, NULL), SHC_INVALID_ARGUMENT,
          "gather: root is -1");
  refused(shc_gather(comm, a, b, (shc_dtype)8, 1, 0, 0, NULL), SHC_INVALID_ARGUMENT,
          "shc_gather: dtype is 8");
  refused(shc_scatter(comm, a, b, SHC_F32, 1, 99, 0, NULL), SHC_INVALID_ARGUMENT,
          "scatter: root is 99");
  refused(shc_reduce(comm, a, b, SHC_F32, 2, (shc_op)8, 0, 0, NULL), SHC_INVALID_ARGUMENT,
          "op is 8; it must be an shc_op, SHC_SUM (0) to SHC_BXOR (7)");
  refused(shc_reduce(comm, a, b, SHC_F32, 2, SHC_BXOR, 0, 0, NULL), SHC_INVALID_ARGUMENT,
          "op is bxor, an operation of bits, and elements are f32; it accepts u8, i8, i32 and i64");
  shc_collective* bound = NULL;
  refused(shc_bind_reduce(comm, a, b, SHC_F64, 1, SHC_BAND, 0, 0, &bound), SHC_INVALID_ARGUMENT,
          "op is band");
  refused(shc_bind_gather(comm, NULL, b, SHC_F32, 1, 0, 0, &bound), SHC_INVALID_ARGUMENT,
          "send is null");
  refused(shc_bind_all_to_all(comm, a, two, b, NULL, SHC_F32, 0, &bound), SHC_INVALID_ARGUMENT,
          "recv_counts is NULL");
  refused(shc_scatter(NULL, a, b, SHC_F32, 1, 0, 0, NULL), SHC_INVALID_ARGUMENT, "comm is NULL");
  require(bound == NULL, "nothing was bound");
  ok(shc_barrier(comm, 0, NULL));
}

// Rank 0 sends two elements where rank 1 expects one.
static void tell_of_counts_that_differ(shc_comm* comm) {
  int64_t sent[kMostRanks] = {1, 1, 1, 1};
  const int64_t received[kMostRanks] = {1, 1, 1, 1};
  if (rank_of(comm) == 0) sent[1] = 2;
  float a[2 * kMostRanks] = {0};
  float b[2 * kMostRanks];
  const shc_status status = shc_all_to_all(comm, a, sent, b, received, SHC_F32, 0, NULL);
  refused(status, SHC_COMM_ERROR, "sends 2 elements to rank 1");
  refused(status, SHC_COMM_ERROR, "which expects 1");
  shc_error error = SHC_ERROR_INIT;
  ok(shc_last_error(&error));
  require(strcmp(error.kind, "mismatch") == 0, "a mismatch");
  require(strcmp(error.operation, "all_to_all") == 0, "of this operation");
}

int main(void) {
  const rank_main all[] = {call_each,        combine_bits_and_bytes, bind_each,
                           tell_their_paths, refuse_what_is_wrong,   tell_of_counts_that_differ};
  for (size_t i = 0; i < sizeof(all) / sizeof(*all); ++i) {
    on_processes(2, all[i]);
    on_processes(kMostRanks, all[i]);
    on_threads(3, all[i]);
  }
  on_processes(1, call_each);
  return 0;
}
