// The Open MPI side of compare_gloo.py: arguments are BYTES:ROUNDS; prints {"op/bytes/mpi": [seconds, ...], ...}.
// A time is the slowest rank's from a common start, as there. Results are checked.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static float value(int rank, int i) { return (float)((rank * 131 + i * 7) % 97 - 48); }

static void all_gather(const float* in, float* out, int part) {
  MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void reduce_scatter(const float* in, float* out, int part) {
  MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static double slowest(void (*run)(const float*, float*, int), const float* in, float* out, int part,
                      int inner) {
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  for (int i = 0; i < inner; ++i) run(in, out, part);
  double seconds = (MPI_Wtime() - start) / inner;
  double most;
  MPI_Allreduce(&seconds, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (rank == 0) printf("{");
  for (int a = 1; a < argc; ++a) {
    long bytes = 0, rounds = 0;
    if (sscanf(argv[a], "%ld:%ld", &bytes, &rounds) != 2) MPI_Abort(MPI_COMM_WORLD, 2);
    int numel = (int)(bytes / (long)sizeof(float)), part = numel / ranks;
    float* in = malloc((size_t)bytes);
    float* out = malloc((size_t)bytes);
    for (int i = 0; i < numel; ++i) in[i] = value(rank, i);
    for (int op = 0; op < 2; ++op) {
      void (*run)(const float*, float*, int) = op == 0 ? all_gather : reduce_scatter;
      run(in, out, part);
      for (int i = 0; i < part; ++i) {
        float want = 0;
        for (int r = 0; r < ranks; ++r) want += op == 0 ? 0 : value(r, rank * part + i);
        if (op == 0) want = value((rank + 1) % ranks, i);
        float got = op == 0 ? out[(rank + 1) % ranks * part + i] : out[i];
        if (got != want) MPI_Abort(MPI_COMM_WORLD, 3);
      }
      const char* name = op == 0 ? "all_gather" : "reduce_scatter";
      if (rank == 0) printf("%s\"%s/%ld/mpi\": [", a + op > 1 ? ", " : "", name, bytes);
      for (long round = 0; round < rounds; ++round) {
        double seconds = slowest(run, in, out, part, bytes <= 1024 ? 10 : 1);
        if (rank == 0) printf("%s%.9f", round > 0 ? ", " : "", seconds);
      }
      if (rank == 0) printf("]");
    }
    free(in);
    free(out);
  }
  if (rank == 0) printf("}\n");
  MPI_Finalize();
  return 0;
}
