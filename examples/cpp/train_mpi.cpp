// The ranks are those of mpirun, on one host: mpirun -n 2 train_mpi
#include <mpi.h>

#include "train.h"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  try {
    shc::UniqueId id{};
    if (rank == 0) id = shc::unique_id(SHC_SHM, size);
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    train(shc::Comm(size, id, rank));
  } catch (const shc::Error& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
