// What collectives.c and openmpi.c share: which collectives are called, on which numbers, and how a time is taken.
// Arguments are ROUNDS BYTES...; prints {"op/bytes/peer": [seconds, ...], ...} with a time for each round, which is the
// slowest rank's from a common start, of a call in a row of calls. Each call of a row reads an operand of its own, to
// which its rank has stored since the last row, as computation does: else the other ranks would find in their own caches
// what they read in place. Results are checked first.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier, kOps };

static const char* const kNames[kOps] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"};

// The ranks, as a peer makes them.
struct ranks {
  int rank;
  int size;
  void (*meet)(void);
  double (*most)(double seconds);  // of all ranks
};

// One collective of one peer. All-reduce and broadcast are in place, on `out`. What calls read are calls_of(bytes)
// operands of `bytes` bytes, which follow each other.
struct collective {
  void (*run)(const float* in, float* out, int64_t bytes);
  float* in;
  float* out;
};

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static float value(int rank, int64_t i) { return (float)((rank * 131 + i * 7) % 97 - 48); }

static int64_t numel_of(int64_t bytes) { return bytes / (int64_t)sizeof(float); }

static int calls_of(int64_t bytes) { return bytes <= 4096 ? 200 : bytes <= 65536 ? 40 : bytes <= 1048576 ? 5 : 1; }

// What element `i` of the result of `op` is on a rank.
static float wanted(const struct ranks* ranks, int op, int64_t bytes, int64_t i) {
  const int64_t part = numel_of(bytes) / ranks->size;
  if (op == kGather) return value((int)(i / part), i % part);
  if (op == kBroadcast) return value(0, i);
  float sum = 0;
  for (int r = 0; r < ranks->size; ++r) sum += value(r, op == kReduceScatter ? ranks->rank * part + i : i);
  return sum;
}

static int is_in_place(int op) { return op == kAllReduce || op == kBroadcast; }

static void fill_operands(const struct ranks* ranks, int op, const struct collective* each, int64_t bytes) {
  const int64_t numel = numel_of(bytes);
  float* operands = is_in_place(op) ? each->out : each->in;
  for (int call = 0; call < calls_of(bytes); ++call) {
    for (int64_t i = 0; i < numel; ++i) operands[call * numel + i] = value(ranks->rank, i);
  }
}

// A store to each cache line.
static void store_to_operands(int op, const struct collective* each, int64_t bytes) {
  volatile float* operands = is_in_place(op) ? each->out : each->in;
  for (int64_t i = 0; i < calls_of(bytes) * numel_of(bytes); i += 16) operands[i] = operands[i];
}

static void check(const struct ranks* ranks, int op, const struct collective* each, int64_t bytes) {
  const int64_t numel = numel_of(bytes), part = numel / ranks->size;
  if (op != kBarrier) fill_operands(ranks, op, each, bytes);
  each->run(each->in, each->out, bytes);
  for (int64_t i = 0; op != kBarrier && i < (op == kReduceScatter ? part : numel); ++i) {
    if (each->out[i] == wanted(ranks, op, bytes, i)) continue;
    fprintf(stderr, "%s of %ld bytes: element %ld is %g\n", kNames[op], (long)bytes, (long)i, each->out[i]);
    exit(3);
  }
}

static double slowest(const struct ranks* ranks, int op, const struct collective* each, int64_t bytes) {
  const int calls = calls_of(bytes);
  const int64_t next_in = is_in_place(op) ? 0 : numel_of(bytes), next_out = is_in_place(op) ? numel_of(bytes) : 0;
  if (op != kBarrier) store_to_operands(op, each, bytes);
  ranks->meet();
  const double start = now();
  for (int i = 0; i < calls; ++i) each->run(each->in + i * next_in, each->out + i * next_out, bytes);
  return ranks->most((now() - start) / calls);
}

// Until the system has given each rank a core of its own, if there are enough.
static void warm_up(const struct ranks* ranks) {
  const double start = now();
  while (ranks->most(now() - start) < 0.2) {
    for (int i = 0; i < 100; ++i) ranks->meet();
  }
}

// `first`: whether nothing was printed before.
static void measure(const struct ranks* ranks, const char* peer, int op, const struct collective* each, int64_t bytes,
                    int rounds, int first) {
  // A few times, since the first calls of a size may store in several ways, to see which is faster.
  for (int i = 0; i < (bytes <= 1048576 ? 4 : 1); ++i) check(ranks, op, each, bytes);
  // Sums of sums grow: zeroes stay.
  if (op == kAllReduce) memset(each->out, 0, (size_t)(calls_of(bytes) * bytes));
  if (ranks->rank == 0) printf("%s\"%s/%ld/%s\": [", first ? "{" : ", ", kNames[op], (long)bytes, peer);
  for (int round = 0; round < rounds; ++round) {
    const double seconds = slowest(ranks, op, each, bytes);
    if (ranks->rank == 0) printf("%s%.10f", round > 0 ? ", " : "", seconds);
  }
  if (ranks->rank == 0) printf("]");
}
