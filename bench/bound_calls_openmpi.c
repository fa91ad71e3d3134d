// The Open MPI side of bound_calls.py: as bound_calls.c, with arguments ROUNDS CALLS. "bound" is missing where this MPI
// has no persistent collectives (MPI 4.0, section 6.13; before that an extension of Open MPI).
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#if MPI_VERSION >= 4
#define BIND MPI_Allgather_init
#elif defined(OMPI_HAVE_MPI_EXT_PCOLLREQ)
#define BIND MPIX_Allgather_init
#endif

enum { kNumel = 256 };

static float full[kNumel];
static int part;
static MPI_Request request;

static void plain(void) {
  MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, full, part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void bound(void) {
  MPI_Start(&request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static void measure(const char* before, void (*run)(void), int rank, int rounds, int calls) {
  run();
  for (int i = 0; i < kNumel; ++i) {
    if (full[i] != (float)(i / part + 1)) MPI_Abort(MPI_COMM_WORLD, 3);
  }
  if (rank == 0) printf("%s", before);
  for (int round = 0; round < rounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    for (int i = 0; i < calls; ++i) run();
    const double seconds = (MPI_Wtime() - start) / calls;
    double most;
    MPI_Allreduce(&seconds, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank == 0) printf("%s%.10f", round > 0 ? ", " : "", most);
  }
  if (rank == 0) printf("]");
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 3) MPI_Abort(MPI_COMM_WORLD, 2);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  part = kNumel / ranks;
  for (int i = 0; i < part; ++i) full[rank * part + i] = (float)(rank + 1);
  measure("{\"plain\": [", plain, rank, atoi(argv[1]), atoi(argv[2]));
#ifdef BIND
  BIND(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, full, part, MPI_FLOAT, MPI_COMM_WORLD, MPI_INFO_NULL, &request);
  measure(", \"bound\": [", bound, rank, atoi(argv[1]), atoi(argv[2]));
  MPI_Request_free(&request);
#endif
  if (rank == 0) printf("}\n");
  MPI_Finalize();
  return 0;
}
