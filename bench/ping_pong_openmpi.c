// The Open MPI side of ping_pong.py; ping_pong.h says what it prints.
#include <mpi.h>

#include "ping_pong.h"

static int other;

static void send_to(const void* buffer, size_t bytes) {
  MPI_Send(buffer, (int)bytes, MPI_BYTE, other, 1, MPI_COMM_WORLD);
}

static void recv_from(void* buffer, size_t bytes) {
  MPI_Recv(buffer, (int)bytes, MPI_BYTE, other, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  struct peer peer = {0, send_to, recv_from};
  MPI_Comm_rank(MPI_COMM_WORLD, &peer.rank);
  other = 1 - peer.rank;
  ping_pong(&peer, atoi(argv[1]), argc - 2, argv + 2);
  MPI_Finalize();
  return 0;
}
