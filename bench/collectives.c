// The C side of compare_gloo.py: arguments are RANKS and those of collectives.h, which says what it prints. "C"
// starts from and ends in ordinary memory; "C, window" gathers into communication memory, and reduces from it. Beside
// them stand "probe", "probe, past caches" and, of a gather, "probe, window": what probe.h does for the same.
#include "collectives.h"
#include "probe.h"

#include <sys/wait.h>
#include <unistd.h>

#include "shardcomm.h"

static shc_comm* comm;
static int size;

static void ok(shc_status status) {
  if (status == SHC_OK) return;
  fprintf(stderr, "%s: %s\n", shc_status_name(status), shc_last_error_text());
  exit(1);
}

static void gather(const float* in, float* out, int64_t bytes) {
  ok(shc_all_gather(comm, in, SHC_F32, out, SHC_F32, numel_of(bytes) / size, NULL, NULL));
}

static void reduce_scatter(const float* in, float* out, int64_t bytes) {
  ok(shc_reduce_scatter(comm, in, SHC_F32, out, SHC_F32, numel_of(bytes) / size, SHC_SUM, NULL, NULL));
}

static void all_reduce(const float* in, float* out, int64_t bytes) {
  (void)in;
  ok(shc_all_reduce(comm, out, SHC_F32, numel_of(bytes), SHC_SUM, 0, NULL));
}

static void broadcast(const float* in, float* out, int64_t bytes) {
  (void)in;
  ok(shc_broadcast(comm, out, SHC_F32, numel_of(bytes), 0, NULL));
}

static void barrier(const float* in, float* out, int64_t bytes) {
  (void)in, (void)out, (void)bytes;
  ok(shc_barrier(comm, 0, NULL));
}

static void meet(void) { ok(shc_barrier(comm, 0, NULL)); }

static double most(double seconds) {
  ok(shc_all_reduce(comm, &seconds, SHC_F64, 1, SHC_MAX, 0, NULL));
  return seconds;
}

static void measure_all(int rank, int rounds, int64_t bytes, int first) {
  const struct ranks ranks = {rank, size, meet, most};
  if (first) warm_up(&ranks);
  void (*const runs[kOps])(const float*, float*, int64_t) = {gather, reduce_scatter, all_reduce, broadcast, barrier};
  void (*const probes[kOps])(const float*, float*, int64_t) = {probe_gather, probe_reduce_scatter, probe_all_reduce,
                                                               probe_broadcast, probe_barrier};
  const size_t operands = (size_t)(calls_of(bytes) * bytes);
  float* in = malloc(operands);
  float* out = malloc(operands);
  shc_memory *gathered, *reduced;
  void *window, *own;
  ok(shc_allocate(comm, (size_t)bytes, SHC_GATHER, &gathered, &window));
  ok(shc_allocate(comm, operands, SHC_REDUCE, &reduced, &own));
  for (int op = 0; op < kOps; ++op) {
    const struct collective ordinary = {runs[op], in, out};
    struct collective allocated = ordinary;
    if (op == kGather) allocated.out = window;
    if (op == kReduceScatter) allocated.in = own;
    if (op == kAllReduce || op == kBroadcast) allocated.out = own;
    measure(&ranks, "C", op, &ordinary, bytes, rounds, first && op == 0);
    measure(&ranks, "C, window", op, &allocated, bytes, rounds, 0);
    const struct collective limit = {probes[op], in, out};
    for (probe.streams = 0; probe.streams < 2; ++probe.streams) {
      measure(&ranks, probe.streams ? "probe, past caches" : "probe", op, &limit, bytes, rounds, 0);
    }
    if (op != kGather) continue;
    const struct collective window_limit = {probe_gather_window, in, (float*)window};
    measure(&ranks, "probe, window", op, &window_limit, bytes, rounds, 0);
  }
  shc_memory_destroy(gathered);
  shc_memory_destroy(reduced);
  free(in);
  free(out);
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  size = atoi(argv[1]);
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_SHM, size, &id));
  size_t most = 0;
  for (int a = 3; a < argc; ++a) most = (size_t)atol(argv[a]) > most ? (size_t)atol(argv[a]) : most;
  probe_make(size, most);
  for (int rank = 0; rank < size; ++rank) {
    if (fork() != 0) continue;
    probe_join(rank);
    ok(shc_comm_init_rank(&comm, size, &id, rank, NULL));
    for (int a = 3; a < argc; ++a) measure_all(rank, atoi(argv[2]), atol(argv[a]), a == 3);
    if (rank == 0) printf("}\n");
    shc_comm_destroy(comm);
    return 0;
  }
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    if (wait(&status) < 0 || status != 0) return 1;
  }
  return 0;
}
