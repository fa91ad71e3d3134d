// The collectives from C, on processes and on threads: called, on streams, and bound.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { kPart = 1000, kMostRanks = 4, kRounds = 5 };

struct buffers {
  float send[kPart * kMostRanks];
  float* full;     // memory that all ranks share
  float* own;      // memory that the others read
  uint16_t* half;  // the same, for 16-bit floats
  shc_memory* memory[3];
};

static struct buffers* buffers_of(shc_comm* comm) {
  struct buffers* made = calloc(1, sizeof(*made));
  const size_t numel = (size_t)kPart * (size_t)size_of(comm);
  ok(shc_allocate(comm, numel * sizeof(float), SHC_GATHER, &made->memory[0], (void**)&made->full));
  ok(shc_allocate(comm, numel * sizeof(float), SHC_REDUCE, &made->memory[1], (void**)&made->own));
  ok(shc_allocate(comm, numel * 2, SHC_GATHER, &made->memory[2], (void**)&made->half));
  for (size_t i = 0; i < numel; ++i) {
    made->send[i] = made->own[i] = value_of(rank_of(comm), (int64_t)i);
  }
  return made;
}

static void drop(struct buffers* buffers) {
  for (int i = 0; i < 3; ++i) shc_memory_destroy(buffers->memory[i]);
  free(buffers);
}

static void require_gathered(const float* full, int size) {
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i < kPart; ++i) require(full[r * kPart + i] == value_of(r, i), "gathered");
  }
}

static float total_of(int size, int64_t i) {
  float total = 0;
  for (int r = 0; r < size; ++r) total += value_of(r, i);
  return total;
}

static void require_reduced(const float* part, int rank, int size, float scale) {
  for (int i = 0; i < kPart; ++i) {
    require(part[i] == scale * total_of(size, rank * kPart + i), "reduced");
  }
}

static void call_each(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  struct buffers* b = buffers_of(comm);
  float part[kPart];
  for (int round = 0; round < kRounds; ++round) {
    ok(shc_all_gather(comm, b->send, SHC_F32, b->full, SHC_F32, kPart, NULL, NULL));
    require_gathered(b->full, size);
    ok(shc_barrier(comm, 7, NULL));
    memset(b->full, 0, sizeof(float) * kPart);  // before the next gather writes

    ok(shc_reduce_scatter(comm, b->own, SHC_F32, part, SHC_F32, kPart, SHC_SUM, NULL, NULL));
    require_reduced(part, rank, size, 1);

    float all[kPart];
    memcpy(all, b->send, sizeof(all));
    ok(shc_all_reduce(comm, all, SHC_F32, kPart, SHC_MAX, 0, NULL));
    for (int i = 0; i < kPart; ++i) {
      float most = value_of(0, i);
      for (int r = 1; r < size; ++r) most = fmaxf(most, value_of(r, i));
      require(all[i] == most, "the greatest");
    }

    const int root = round % size;
    memcpy(all, b->send, sizeof(all));
    ok(shc_broadcast(comm, all, SHC_F32, kPart, root, NULL));
    for (int i = 0; i < kPart; ++i) require(all[i] == value_of(root, i), "broadcast");
  }
  drop(b);
}

static void convert_and_scale(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  struct buffers* b = buffers_of(comm);
  ok(shc_all_gather(comm, b->send, SHC_F32, b->half, SHC_BF16, kPart, NULL, NULL));
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i < kPart; ++i) {
      const float value = value_of(r, i);  // small and whole: bfloat16 is its upper half
      uint32_t bits = 0;
      memcpy(&bits, &value, sizeof(bits));
      require(b->half[r * kPart + i] == bits >> 16, "converted on the way");
    }
  }

  shc_reduce_options options = SHC_REDUCE_OPTIONS_INIT;
  options.scale = 0.5f;
  options.accumulate = 1;
  int32_t nonfinite = 0;
  options.nonfinite = &nonfinite;
  float part[kPart];
  for (int i = 0; i < kPart; ++i) part[i] = 100;
  ok(shc_reduce_scatter(comm, b->own, SHC_F32, part, SHC_F32, kPart, SHC_SUM, &options, NULL));
  for (int i = 0; i < kPart; ++i) {
    require(part[i] == 100 + 0.5f * total_of(size, rank * kPart + i), "scaled and added");
  }
  require(nonfinite == 0, "all is finite");
  ok(shc_barrier(comm, 0, NULL));
  b->own[0] = INFINITY;
  ok(shc_reduce_scatter(comm, b->own, SHC_F32, part, SHC_F32, kPart, SHC_SUM, &options, NULL));
  require(nonfinite == (rank == 0), "the rank that got Inf knows it");
  drop(b);
}

static void gather_uneven(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  struct buffers* b = buffers_of(comm);
  int64_t counts[kMostRanks];
  for (int r = 0; r < size; ++r) counts[r] = r == 1 ? 0 : 10 * r + 3;
  shc_gather_options options = SHC_GATHER_OPTIONS_INIT;
  options.counts = counts;
  ok(shc_all_gather(comm, b->send, SHC_F32, b->full, SHC_F32, counts[rank], &options, NULL));
  int64_t begin = 0;
  for (int r = 0; r < size; begin += counts[r++]) {
    for (int64_t i = 0; i < counts[r]; ++i) {
      require(b->full[begin + i] == value_of(r, i), "gathered parts of other lengths");
    }
  }
  drop(b);
}

static void use_streams(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  struct buffers* b = buffers_of(comm);
  shc_stream* gathers = NULL;
  shc_stream* reduces = NULL;
  ok(shc_stream_create_thread(&gathers));
  ok(shc_stream_create_thread(&reduces));
  float part[kPart];
  for (int round = 0; round < kRounds; ++round) {
    shc_event* gathered = NULL;
    shc_event* reduced = NULL;
    ok(shc_all_gather(comm, b->send, SHC_F32, b->full, SHC_F32, kPart, NULL, gathers));
    ok(shc_stream_record(gathers, &gathered));
    ok(shc_stream_wait(reduces, gathered));  // an order between the two, on every rank
    ok(shc_reduce_scatter(comm, b->own, SHC_F32, part, SHC_F32, kPart, SHC_AVG, NULL, reduces));
    ok(shc_stream_record(reduces, &reduced));
    ok(shc_event_wait(reduced, 60));
    require(shc_event_query(gathered) == SHC_OK, "what came before has ended, too");
    require_gathered(b->full, size);
    require_reduced(part, rank, size, 1.0f / (float)size);
    shc_event_destroy(gathered);
    shc_event_destroy(reduced);
    ok(shc_barrier(comm, 0, NULL));
  }
  shc_stream_destroy(gathers);
  shc_stream_destroy(reduces);
  drop(b);
}

static void bind_each(shc_comm* comm) {
  const int rank = rank_of(comm);
  const int size = size_of(comm);
  struct buffers* b = buffers_of(comm);
  float part[kPart];
  float all[kPart];
  shc_collective* gather = NULL;
  shc_collective* reduce = NULL;
  shc_collective* sum = NULL;
  shc_collective* share = NULL;
  shc_collective* meet = NULL;
  ok(shc_bind_all_gather(comm, b->send, SHC_F32, b->full, SHC_F32, kPart, NULL, &gather));
  ok(shc_bind_reduce_scatter(comm, b->own, SHC_F32, part, SHC_F32, kPart, SHC_SUM, NULL, &reduce));
  ok(shc_bind_all_reduce(comm, all, SHC_F32, kPart, SHC_SUM, 0, &sum));
  ok(shc_bind_broadcast(comm, all, SHC_F32, kPart, size - 1, &share));
  ok(shc_bind_barrier(comm, 0, &meet));
  shc_stream* stream = NULL;
  ok(shc_stream_create_thread(&stream));
  for (int round = 0; round < kRounds; ++round) {
    memset(part, 0, sizeof(part));
    ok(shc_start(gather, NULL));
    require_gathered(b->full, size);
    ok(shc_start(meet, NULL));
    ok(shc_start(reduce, NULL));
    require_reduced(part, rank, size, 1);
    memcpy(all, b->send, sizeof(all));
    ok(shc_start(sum, NULL));
    for (int i = 0; i < kPart; ++i) require(all[i] == total_of(size, i), "summed");
    memcpy(all, b->send, sizeof(all));
    ok(shc_start(share, NULL));
    for (int i = 0; i < kPart; ++i) require(all[i] == value_of(size - 1, i), "shared");

    memset(part, 0, sizeof(part));
    shc_event* end = NULL;
    ok(shc_start(reduce, stream));
    ok(shc_stream_record(stream, &end));
    ok(shc_event_wait(end, 60));
    require_reduced(part, rank, size, 1);
    shc_event_destroy(end);
  }
  shc_stream_destroy(stream);
  shc_collective_destroy(gather);
  shc_collective_destroy(reduce);
  shc_collective_destroy(sum);
  shc_collective_destroy(share);
  shc_collective_destroy(meet);
  drop(b);
}

static void tell_their_paths(shc_comm* comm) {
  struct buffers* b = buffers_of(comm);
  shc_receipt receipt = SHC_RECEIPT_INIT;
  require(shc_comm_receipt(comm, "all_gather", &receipt) == SHC_NOT_READY, "there was none yet");
  ok(shc_all_gather(comm, b->send, SHC_F32, b->full, SHC_F32, kPart, NULL, NULL));
  ok(shc_comm_receipt(comm, "all_gather", &receipt));
  require(strcmp(receipt.taken, "window") == 0 && strcmp(receipt.reason, "") == 0, "the window");
  ok(shc_barrier(comm, 0, NULL));
  float private_memory[kPart * kMostRanks];
  ok(shc_all_gather(comm, b->send, SHC_F32, private_memory, SHC_F32, kPart, NULL, NULL));
  ok(shc_comm_receipt(comm, "all_gather", &receipt));
  require(strcmp(receipt.taken, "inline") == 0, "few elements go with the call");
  const int64_t many = 100000;
  float* send = calloc((size_t)many, sizeof(float));
  float* recv = calloc((size_t)(many * size_of(comm)), sizeof(float));
  ok(shc_all_gather(comm, send, SHC_F32, recv, SHC_F32, many, NULL, NULL));
  ok(shc_comm_receipt(comm, "all_gather", &receipt));
  require(strcmp(receipt.taken, "window") != 0, "another path into private memory");
  require(strstr(receipt.reason, "recv is not communication memory") != NULL, "which says why");
  free(send);
  free(recv);
  refused(shc_comm_receipt(comm, "alltoall", &receipt), SHC_INVALID_ARGUMENT,
          "operation is \"alltoall\"; accepted: \"all_gather\"");
  drop(b);
}

// Two ranks cancel. A sum that is rounded at each addition loses the third rank's number.
static void sum_exactly(shc_comm* comm) {
  const int rank = rank_of(comm);
  shc_unique_id id;
  if (rank == 0) ok(shc_get_unique_id(SHC_SHM, 3, &id));
  ok(shc_broadcast(comm, &id, SHC_U8, sizeof(id), 0, NULL));
  shc_comm_options options = SHC_COMM_OPTIONS_INIT;
  options.exact_sums = 1;
  shc_comm* exact = NULL;
  ok(shc_comm_init_rank(&exact, 3, &id, rank, &options));
  const float numbers[] = {0x1p60f, 1.0f, -0x1p60f};
  float sum = numbers[rank];
  ok(shc_all_reduce(exact, &sum, SHC_F32, 1, SHC_SUM, 0, NULL));
  require(sum == 1.0f, "all_reduce is exact");
  sum = 0;
  ok(shc_reduce(exact, &numbers[rank], &sum, SHC_F32, 1, SHC_SUM, 1, 0, NULL));
  require(sum == (rank == 1 ? 1.0f : 0.0f), "reduce is exact");
  const float parts[] = {numbers[rank], numbers[rank], numbers[rank]};
  ok(shc_reduce_scatter(exact, parts, SHC_F32, &sum, SHC_F32, 1, SHC_SUM, NULL, NULL));
  require(sum == 1.0f, "reduce_scatter is exact");
  shc_comm_destroy(exact);
}

int main(void) {
  const rank_main all[] = {call_each,   convert_and_scale, gather_uneven,
                           use_streams, bind_each,         tell_their_paths};
  for (size_t i = 0; i < sizeof(all) / sizeof(*all); ++i) {
    on_processes(2, all[i]);
    on_processes(kMostRanks, all[i]);
    on_threads(3, all[i]);
  }
  on_processes(1, call_each);
  on_processes(3, sum_exactly);
  return 0;
}
