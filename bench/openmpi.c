// The Open MPI side of compare_gloo.py; collectives.h says what it prints.
#include <mpi.h>

#include "collectives.h"

static int size;

static void gather(const float* in, float* out, int64_t bytes) {
  const int part = (int)numel_of(bytes) / size;
  MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void reduce_scatter(const float* in, float* out, int64_t bytes) {
  MPI_Reduce_scatter_block(in, out, (int)numel_of(bytes) / size, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void all_reduce(const float* in, float* out, int64_t bytes) {
  (void)in;
  MPI_Allreduce(MPI_IN_PLACE, out, (int)numel_of(bytes), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void broadcast(const float* in, float* out, int64_t bytes) {
  (void)in;
  MPI_Bcast(out, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
}

static void barrier(const float* in, float* out, int64_t bytes) {
  (void)in, (void)out, (void)bytes;
  MPI_Barrier(MPI_COMM_WORLD);
}

static void meet(void) { MPI_Barrier(MPI_COMM_WORLD); }

static double most(double seconds) {
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return seconds;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  struct ranks ranks = {.meet = meet, .most = most};
  MPI_Comm_rank(MPI_COMM_WORLD, &ranks.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks.size);
  size = ranks.size;
  warm_up(&ranks);
  void (*const runs[kOps])(const float*, float*, int64_t) = {gather, reduce_scatter, all_reduce, broadcast, barrier};
  for (int a = 2; a < argc; ++a) {
    const int64_t bytes = atol(argv[a]);
    const size_t operands = (size_t)(calls_of(bytes) * bytes);
    float* in = malloc(operands);
    float* out = malloc(operands);
    for (int op = 0; op < kOps; ++op) {
      const struct collective each = {runs[op], in, out};
      measure(&ranks, "Open MPI", op, &each, bytes, atoi(argv[1]), a == 2 && op == 0);
    }
    free(in);
    free(out);
  }
  if (ranks.rank == 0) printf("}\n");
  MPI_Finalize();
  return 0;
}
