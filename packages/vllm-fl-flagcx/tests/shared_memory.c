/* FlagCX's C interface over POSIX shared memory, for tests: ranks are processes of one machine, and
 * tensors lie in their own memory. Sums are formed in the order of the ranks, in float for the two
 * half precisions. Whatever waits gives up after FLAGCX_TEST_SECONDS (20), or when a rank has died,
 * with flagcxRemoteError.
 *
 * -DOLDER  the functions of a FlagCX before 0.13
 * -DHALF   without flagcxAllGather
 * -DWRONG  rank 1 gets sums that are one too large
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6, UNSUPPORTED = 9 };
enum { INT8, UINT8, INT32 = 2, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum { SUM, PROD, MAX, MIN, AVG };
enum { ID = 256, RANKS = 8, SLOT = 1 << 16, MAIL = 1 << 14, STREAM = 0x57A3 };

static const size_t width[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

typedef struct {
  _Atomic uint64_t written, taken;
  char bytes[MAIL];
} Mail;

typedef struct {
  _Atomic uint64_t arrived[RANKS];
  _Atomic int process[RANKS];
  _Atomic int broken;
  char slot[RANKS][SLOT];
  Mail mail[RANKS][RANKS]; /* [from][to] */
} Segment;

typedef struct Call {
  int kind; /* of the functions below */
  const char *from;
  char *to;
  size_t count;
  int type, op, peer;
  size_t done;
  struct Call *next;
} Call;

typedef struct {
  Segment *segment;
  int rank, size, depth;
  uint64_t steps;
  Call *first, **last;
} Comm;

typedef struct { int mark; void *raw; } Stream;

/* Waiting. */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static double patience(void) {
  const char *seconds = getenv("FLAGCX_TEST_SECONDS");
  return seconds ? atof(seconds) : 20;
}

static int lost(Comm *c) {
  for (int r = 0; r < c->size; r++) {
    int process = c->segment->process[r];
    if (process && kill(process, 0) != 0 && errno == ESRCH) return 1;
  }
  return 0;
}

/* One turn of waiting: whether to go on. */
static int turn(Comm *c, unsigned *turns, double until) {
  if (c->segment->broken) return 0;
  if (++*turns < 200) {
    sched_yield();
    return 1;
  }
  usleep(50);
  if (*turns % 200 == 0 && (now() > until || lost(c))) {
    c->segment->broken = 1;
    return 0;
  }
  return 1;
}

static int barrier(Comm *c) {
  uint64_t step = ++c->steps;
  c->segment->arrived[c->rank] = step;
  double until = now() + patience();
  unsigned turns = 0;
  for (int r = 0; r < c->size; r++)
    while (c->segment->arrived[r] < step)
      if (!turn(c, &turns, until)) return REMOTE;
  return OK;
}

/* Reducing. */

static float of_bfloat16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static uint16_t to_bfloat16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#define JOIN(acc, x, op)                                     \
  ((op) == PROD ? (acc) * (x) : (op) == MAX ? ((acc) > (x) ? (acc) : (x)) \
   : (op) == MIN ? ((acc) < (x) ? (acc) : (x)) : (acc) + (x))

#define REDUCE(T, A, READ, WRITE)                                        \
  for (size_t i = 0; i < count; i++) {                                   \
    A acc = READ(((T *)s->slot[0])[i]);                                  \
    for (int r = 1; r < c->size; r++) {                                  \
      A x = READ(((T *)s->slot[r])[i]);                                  \
      acc = JOIN(acc, x, op);                                            \
    }                                                                    \
    if (op == AVG) acc = acc / (A)c->size;                               \
    ((T *)to)[i] = WRITE(acc);                                           \
  }                                                                      \
  break;

#define PLAIN(x) (x)

static void reduce_slots(Comm *c, char *to, size_t count, int type, int op) {
  Segment *s = c->segment;
  switch (type) {
    case INT8: REDUCE(int8_t, int8_t, PLAIN, PLAIN)
    case UINT8: REDUCE(uint8_t, uint8_t, PLAIN, PLAIN)
    case INT32: REDUCE(int32_t, int32_t, PLAIN, PLAIN)
    case UINT32: REDUCE(uint32_t, uint32_t, PLAIN, PLAIN)
    case INT64: REDUCE(int64_t, int64_t, PLAIN, PLAIN)
    case UINT64: REDUCE(uint64_t, uint64_t, PLAIN, PLAIN)
    case FLOAT16: REDUCE(_Float16, float, PLAIN, (_Float16))
    case FLOAT32: REDUCE(float, float, PLAIN, PLAIN)
    case FLOAT64: REDUCE(double, double, PLAIN, PLAIN)
    case BFLOAT16: REDUCE(uint16_t, float, of_bfloat16, to_bfloat16)
  }
#ifdef WRONG
  if (c->rank == 1 && type == FLOAT32)
    for (size_t i = 0; i < count; i++) ((float *)to)[i] += 1;
#endif
}

/* Collectives: chunk by chunk through the slots. `whole` is what each rank gives, in elements. */

static int reduced(Comm *c, const char *from, char *to, size_t whole, int type, int op, int root) {
  size_t most = SLOT / width[type];
  for (size_t at = 0; at < whole; at += most) {
    size_t count = whole - at < most ? whole - at : most;
    memcpy(c->segment->slot[c->rank], from + at * width[type], count * width[type]);
    if (barrier(c)) return REMOTE;
    if (root < 0 || root == c->rank) reduce_slots(c, to + at * width[type], count, type, op);
    if (barrier(c)) return REMOTE;
  }
  return OK;
}

/* Root's bytes to all; root < 0: everybody's, one after the other. */
static int spread(Comm *c, const char *from, char *to, size_t bytes, int root) {
  for (size_t at = 0; at < bytes; at += SLOT) {
    size_t count = bytes - at < SLOT ? bytes - at : SLOT;
    if (root < 0 || root == c->rank) memcpy(c->segment->slot[c->rank], from + at, count);
    if (barrier(c)) return REMOTE;
    for (int r = 0; r < c->size; r++)
      if (root < 0) memcpy(to + r * bytes + at, c->segment->slot[r], count);
      else if (r == root) memcpy(to + at, c->segment->slot[r], count);
    if (barrier(c)) return REMOTE;
  }
  return OK;
}

enum { ALLREDUCE, REDUCE_TO, ALLGATHER, REDUCESCATTER, BROADCAST, SEND, RECV };

static int together(Comm *c, Call *k) {
  switch (k->kind) {
    case ALLREDUCE: return reduced(c, k->from, k->to, k->count, k->type, k->op, -1);
    case REDUCE_TO: return reduced(c, k->from, k->to, k->count, k->type, k->op, k->peer);
    case ALLGATHER: return spread(c, k->from, k->to, k->count * width[k->type], -1);
    case BROADCAST: return spread(c, k->from, k->to, k->count * width[k->type], k->peer);
    case REDUCESCATTER:
      for (int r = 0; r < c->size; r++) {
        const char *part = k->from + r * k->count * width[k->type];
        int result = reduced(c, part, k->to, k->count, k->type, k->op, r);
        if (result) return result;
      }
      return OK;
  }
  return ARGUMENT;
}

/* As much of a send or receive as there is room for; whether it is whole. */
static int moved(Comm *c, Call *k) {
  size_t bytes = k->count * width[k->type];
  int sends = k->kind == SEND;
  Mail *m = sends ? &c->segment->mail[c->rank][k->peer] : &c->segment->mail[k->peer][c->rank];
  uint64_t written = m->written, taken = m->taken;
  size_t here = sends ? MAIL - (written - taken) : written - taken;
  if (here > bytes - k->done) here = bytes - k->done;
  for (size_t i = 0; i < here; i++)
    if (sends) m->bytes[(written + i) % MAIL] = k->from[k->done + i];
    else k->to[k->done + i] = m->bytes[(taken + i) % MAIL];
  k->done += here;
  if (sends) m->written = written + here;
  else m->taken = taken + here;
  return k->done == bytes;
}

/* Two sends to one rank, or two receives from it, keep their order. */
static int waits_behind(Call *first, Call *k) {
  for (Call *e = first; e != k; e = e->next)
    if (e->kind == k->kind && e->peer == k->peer && e->done < e->count * width[e->type]) return 1;
  return 0;
}

static int run(Comm *c) {
  int result = OK, left = 1;
  double until = now() + patience();
  unsigned turns = 0;
  for (Call *k = c->first; k && !result; k = k->next)
    if (k->kind < SEND) result = together(c, k);
  while (left && !result) {
    left = 0;
    for (Call *k = c->first; k; k = k->next)
      if (k->kind >= SEND && k->done < k->count * width[k->type])
        left |= waits_behind(c->first, k) || !moved(c, k);
    if (left && !turn(c, &turns, until)) result = REMOTE;
  }
  for (Call *k = c->first, *next; k; k = next) {
    next = k->next;
    free(k);
  }
  c->first = NULL;
  c->last = &c->first;
  return result;
}

static int add(Comm *c, Call call, Stream *stream) {
  if (!c || !stream || stream->mark != STREAM) return ARGUMENT;
  if (call.type < 0 || call.type > BFLOAT16 || call.peer >= c->size) return ARGUMENT;
  if (c->segment->broken) return REMOTE;
  Call *k = malloc(sizeof *k);
  if (!k) return SYSTEM;
  *k = call;
  *c->last = k;
  c->last = &k->next;
  return c->depth ? OK : run(c);
}

/* FlagCX's interface. */

#define MOVES const void *from, void *to, size_t count, int type

int flagcxAllReduce(MOVES, int op, Comm *c, Stream *s) {
  return add(c, (Call){ALLREDUCE, from, to, count, type, op}, s);
}
int flagcxReduce(MOVES, int op, int root, Comm *c, Stream *s) {
  return add(c, (Call){REDUCE_TO, from, to, count, type, op, root}, s);
}
#ifndef HALF
int flagcxAllGather(MOVES, Comm *c, Stream *s) {
  return add(c, (Call){ALLGATHER, from, to, count, type}, s);
}
#endif
int flagcxReduceScatter(MOVES, int op, Comm *c, Stream *s) {
  return add(c, (Call){REDUCESCATTER, from, to, count, type, op}, s);
}
int flagcxBroadcast(MOVES, int root, Comm *c, Stream *s) {
  return add(c, (Call){BROADCAST, from, to, count, type, 0, root}, s);
}
int flagcxSend(const void *from, size_t count, int type, int peer, Comm *c, Stream *s) {
  return add(c, (Call){SEND, from, NULL, count, type, 0, peer}, s);
}
int flagcxRecv(void *to, size_t count, int type, int peer, Comm *c, Stream *s) {
  return add(c, (Call){RECV, NULL, to, count, type, 0, peer}, s);
}

int flagcxGroupStart(Comm *c) {
  if (!c) return ARGUMENT;
  c->depth++;
  return OK;
}
int flagcxGroupEnd(Comm *c) {
  if (!c || c->depth == 0) return USAGE;
  return --c->depth ? OK : run(c);
}

const char *flagcxGetErrorString(int result) {
  return result == REMOTE ? "a rank is gone, or did not come"
         : result == ARGUMENT ? "invalid argument" : result == USAGE ? "invalid usage" : "error";
}

int flagcxGetVersion(int *version) {
  *version = 1300;
  return OK;
}

int flagcxGetUniqueId(char *id) {
  static _Atomic int count;
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  memset(id, 0, ID);
  snprintf(id, ID, "/flagcx-test-%d-%d-%ld", getpid(), count++, t.tv_nsec);
  return OK;
}

int flagcxCommInitRank(Comm **out, int size, const char *id, int rank) {
  if (size < 1 || size > RANKS || rank < 0 || rank >= size) return ARGUMENT;
  int file = shm_open(id, O_CREAT | O_RDWR, 0600);
  if (file < 0) return SYSTEM;
  if (ftruncate(file, sizeof(Segment))) return SYSTEM;
  Segment *s = mmap(NULL, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (s == MAP_FAILED) return SYSTEM;
  Comm *c = calloc(1, sizeof *c);
  if (!c) return SYSTEM;
  c->segment = s;
  c->rank = rank;
  c->size = size;
  c->last = &c->first;
  s->process[rank] = getpid();
  int result = barrier(c);
  shm_unlink(id);
  if (result) return result;
  *out = c;
  return OK;
}

int flagcxCommDestroy(Comm *c) {
  if (!c) return ARGUMENT;
  munmap(c->segment, sizeof(Segment));
  free(c);
  return OK;
}

static int copy_stream(Stream **out, void *raw) {
  *out = malloc(sizeof **out);
  **out = (Stream){STREAM, raw};
  return OK;
}
static int free_stream(Stream *s) {
  if (!s || s->mark != STREAM) return ARGUMENT;
  s->mark = 0;
  free(s);
  return OK;
}
static int unsupported(void) { return UNSUPPORTED; }

#ifdef OLDER
int flagcxHandleInit(void *handler) { return unsupported(); }
#else
int flagcxDeviceHandleInit(void ***out) {
  void **table = calloc(28, sizeof *table);
  for (int i = 0; i < 28; i++) table[i] = (void *)unsupported;
  table[12] = (void *)copy_stream;
  table[13] = (void *)free_stream;
  *out = table;
  return OK;
}
int flagcxDeviceHandleFree(void **table) {
  free(table);
  return OK;
}
#endif
