// What ping_pong.c and ping_pong_openmpi.c share: two ranks, of which each sends what it has received. Arguments are
// ROUNDS BYTES...; prints {"BYTES": [seconds, ...], ...}: for each round, half the time there and back. Contents are
// checked first.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct peer {
  int rank;  // 0 or 1
  void (*send)(const void* buffer, size_t bytes);
  void (*recv)(void* buffer, size_t bytes);
};

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void there_and_back(const struct peer* peer, void* buffer, size_t bytes) {
  if (peer->rank == 0) peer->send(buffer, bytes);
  peer->recv(buffer, bytes);
  if (peer->rank == 1) peer->send(buffer, bytes);
}

static void check(const struct peer* peer, unsigned char* buffer, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) buffer[i] = (unsigned char)(peer->rank == 0 ? i * 7 + i / 251 : 0);
  there_and_back(peer, buffer, bytes);
  for (size_t i = 0; i < bytes; ++i) {
    if (buffer[i] == (unsigned char)(i * 7 + i / 251)) continue;
    fprintf(stderr, "%zu bytes: byte %zu is %d\n", bytes, i, buffer[i]);
    exit(3);
  }
}

static void ping_pong(const struct peer* peer, int rounds, int sizes, char** texts) {
  for (int s = 0; s < sizes; ++s) {
    const size_t bytes = (size_t)atol(texts[s]);
    const int calls = bytes <= 4096 ? 2000 : bytes <= 65536 ? 200 : bytes <= 1048576 ? 20 : 3;
    unsigned char* buffer = malloc(bytes + 1);
    check(peer, buffer, bytes);
    if (peer->rank == 0) printf("%s\"%zu\": [", s == 0 ? "{" : ", ", bytes);
    for (int round = 0; round < rounds; ++round) {
      const double start = now();
      for (int i = 0; i < calls; ++i) there_and_back(peer, buffer, bytes);
      if (peer->rank == 0) printf("%s%.10f", round > 0 ? ", " : "", (now() - start) / calls / 2);
    }
    if (peer->rank == 0) printf("]%s", s + 1 < sizes ? "" : "}\n");
    free(buffer);
  }
}
