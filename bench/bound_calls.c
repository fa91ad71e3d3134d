// The C side of bound_calls.py: arguments are RANKS ROUNDS CALLS; prints {"plain": [seconds, ...], "bound": [...]}.
// An all-gather of 1 KiB in place, into memory that the ranks share. A time is that of one of CALLS calls in a row, of
// the slowest rank from a common start. Results are checked.
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shardcomm.h"

enum { kNumel = 256 };

struct gather {
  shc_comm* comm;
  float* full;
  float* own;
  int64_t part;
  shc_collective* bound;
};

static void ok(shc_status status) {
  if (status == SHC_OK) return;
  fprintf(stderr, "%s: %s\n", shc_status_name(status), shc_last_error_text());
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void plain(const struct gather* g) {
  ok(shc_all_gather(g->comm, g->own, SHC_F32, g->full, SHC_F32, g->part, NULL, NULL));
}

static void bound(const struct gather* g) { ok(shc_start(g->bound, NULL)); }

static double slowest(void (*run)(const struct gather*), const struct gather* g, int calls) {
  ok(shc_barrier(g->comm, 0, NULL));
  const double start = now();
  for (int i = 0; i < calls; ++i) run(g);
  double seconds = (now() - start) / calls;
  ok(shc_all_reduce(g->comm, &seconds, SHC_F64, 1, SHC_MAX, 0, NULL));
  return seconds;
}

static void measure(shc_comm* comm, int rank, int ranks, int rounds, int calls) {
  struct gather g = {.comm = comm, .part = kNumel / ranks};
  shc_memory* memory;
  ok(shc_allocate(comm, kNumel * sizeof(float), SHC_GATHER, &memory, (void**)&g.full));
  g.own = g.full + rank * g.part;
  ok(shc_bind_all_gather(comm, g.own, SHC_F32, g.full, SHC_F32, g.part, NULL, &g.bound));
  for (int64_t i = 0; i < g.part; ++i) g.own[i] = (float)(rank + 1);
  bound(&g);
  for (int i = 0; i < kNumel; ++i) {
    if (g.full[i] != (float)(i / g.part + 1)) exit(3);
  }
  double* seconds = malloc(2 * (size_t)rounds * sizeof(double));
  for (int round = 0; round < rounds; ++round) {
    seconds[round] = slowest(plain, &g, calls);
    seconds[rounds + round] = slowest(bound, &g, calls);
  }
  for (int i = 0; rank == 0 && i < 2 * rounds; ++i) {
    printf("%s%.10f", i == 0 ? "{\"plain\": [" : i == rounds ? "], \"bound\": [" : ", ", seconds[i]);
  }
  if (rank == 0) printf("]}\n");
  free(seconds);
  shc_collective_destroy(g.bound);
  shc_memory_destroy(memory);
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int ranks = atoi(argv[1]);
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_SHM, ranks, &id));
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    shc_comm* comm;
    ok(shc_comm_init_rank(&comm, ranks, &id, rank, NULL));
    measure(comm, rank, ranks, atoi(argv[2]), atoi(argv[3]));
    shc_comm_destroy(comm);
    return 0;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    if (wait(&status) < 0 || status != 0) return 1;
  }
  return 0;
}
