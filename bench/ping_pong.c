// Our side of ping_pong.py; ping_pong.h says what it prints.
#include "ping_pong.h"

#include <sys/wait.h>
#include <unistd.h>

#include "shardcomm.h"

static shc_comm* comm;
static int other;

static void ok(shc_status status) {
  if (status == SHC_OK) return;
  fprintf(stderr, "%s: %s\n", shc_status_name(status), shc_last_error_text());
  exit(1);
}

static void send_to(const void* buffer, size_t bytes) { ok(shc_send(comm, buffer, bytes, other, 1)); }

static void recv_from(void* buffer, size_t bytes) { ok(shc_recv(comm, buffer, bytes, other, 1, NULL)); }

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_SHM, 2, &id));
  const pid_t child = fork();
  const struct peer peer = {child == 0, send_to, recv_from};
  other = 1 - peer.rank;
  ok(shc_comm_init_rank(&comm, 2, &id, peer.rank, NULL));
  ping_pong(&peer, atoi(argv[1]), argc - 2, argv + 2);
  shc_comm_destroy(comm);
  int status = 0;
  return child != 0 && (wait(&status) < 0 || status != 0);
}
