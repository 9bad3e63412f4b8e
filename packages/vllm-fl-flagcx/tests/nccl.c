/* FlagCX's C interface over NCCL, for tests on GPUs: calls go to the stream that they are given, and
 * can be captured in CUDA graphs. Whatever waits for a rank that never comes waits as NCCL does.
 */
#include <stdlib.h>
#include <string.h>

/* Of nccl.h, which itself needs CUDA's headers. Enums are ints. */
typedef struct ncclComm *ncclComm_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct { char internal[128]; } ncclUniqueId;
#define MOVES const void *from, void *to, size_t count, int type
int ncclAllReduce(MOVES, int op, ncclComm_t, cudaStream_t);
int ncclReduce(MOVES, int op, int root, ncclComm_t, cudaStream_t);
int ncclAllGather(MOVES, ncclComm_t, cudaStream_t);
int ncclReduceScatter(MOVES, int op, ncclComm_t, cudaStream_t);
int ncclBroadcast(MOVES, int root, ncclComm_t, cudaStream_t);
int ncclSend(const void *from, size_t count, int type, int peer, ncclComm_t, cudaStream_t);
int ncclRecv(void *to, size_t count, int type, int peer, ncclComm_t, cudaStream_t);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclGetUniqueId(ncclUniqueId *);
int ncclCommInitRank(ncclComm_t *, int size, ncclUniqueId, int rank);
int ncclCommDestroy(ncclComm_t);
const char *ncclGetErrorString(int);

/* Both libraries have the same numbers for types, operations and results up to these. */
enum { BFLOAT16 = 9, AVG = 4, IN_PROGRESS = 7 };

enum { OK = 0, SYSTEM = 2, ARGUMENT = 4, UNHANDLED_CCL = 8, UNSUPPORTED = 9 };
enum { ID = 256, STREAM = 0x57A3 };

typedef struct { ncclComm_t nccl; } Comm;
typedef struct { int mark; cudaStream_t raw; } Stream;

static int to_flagcx(int result) { return result <= IN_PROGRESS ? result : UNHANDLED_CCL; }

/* NCCL has further types and operations, which FlagCX has not. */
static int wrong(const Comm *c, const Stream *s, int type, int op) {
  return !c || !s || s->mark != STREAM || type < 0 || type > BFLOAT16 || op < 0 || op > AVG;
}

#define CALL(type, op, call) return wrong(c, s, type, op) ? ARGUMENT : to_flagcx(call)

int flagcxAllReduce(MOVES, int op, Comm *c, Stream *s) {
  CALL(type, op, ncclAllReduce(from, to, count, type, op, c->nccl, s->raw));
}
int flagcxReduce(MOVES, int op, int root, Comm *c, Stream *s) {
  CALL(type, op, ncclReduce(from, to, count, type, op, root, c->nccl, s->raw));
}
int flagcxAllGather(MOVES, Comm *c, Stream *s) {
  CALL(type, 0, ncclAllGather(from, to, count, type, c->nccl, s->raw));
}
int flagcxReduceScatter(MOVES, int op, Comm *c, Stream *s) {
  CALL(type, op, ncclReduceScatter(from, to, count, type, op, c->nccl, s->raw));
}
int flagcxBroadcast(MOVES, int root, Comm *c, Stream *s) {
  CALL(type, 0, ncclBroadcast(from, to, count, type, root, c->nccl, s->raw));
}
int flagcxSend(const void *from, size_t count, int type, int peer, Comm *c, Stream *s) {
  CALL(type, 0, ncclSend(from, count, type, peer, c->nccl, s->raw));
}
int flagcxRecv(void *to, size_t count, int type, int peer, Comm *c, Stream *s) {
  CALL(type, 0, ncclRecv(to, count, type, peer, c->nccl, s->raw));
}

int flagcxGroupStart(Comm *c) { return c ? to_flagcx(ncclGroupStart()) : ARGUMENT; }
int flagcxGroupEnd(Comm *c) { return c ? to_flagcx(ncclGroupEnd()) : ARGUMENT; }

const char *flagcxGetErrorString(int result) {
  return result == UNHANDLED_CCL ? "an error of NCCL's"
         : result == UNSUPPORTED ? "not supported" : ncclGetErrorString(result);
}

int flagcxGetVersion(int *version) {
  *version = 1300;
  return OK;
}

int flagcxGetUniqueId(char *id) {
  ncclUniqueId unique;
  int result = to_flagcx(ncclGetUniqueId(&unique));
  memset(id, 0, ID);
  if (result == OK) memcpy(id, &unique, sizeof unique);
  return result;
}

/* On the calling thread's CUDA device, as FlagCX does. */
int flagcxCommInitRank(Comm **out, int size, const char *id, int rank) {
  ncclUniqueId unique;
  memcpy(&unique, id, sizeof unique);
  Comm *c = calloc(1, sizeof *c);
  if (!c) return SYSTEM;
  int result = to_flagcx(ncclCommInitRank(&c->nccl, size, unique, rank));
  if (result == OK) *out = c;
  else free(c);
  return result;
}

/* NCCL waits here until no CUDA graph is left that was captured with the group. */
int flagcxCommDestroy(Comm *c) {
  if (!c) return ARGUMENT;
  int result = to_flagcx(ncclCommDestroy(c->nccl));
  free(c);
  return result;
}

static int copy_stream(Stream **out, void *raw) {
  *out = malloc(sizeof **out);
  if (!*out) return SYSTEM;
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

int flagcxDeviceHandleInit(void ***out) {
  void **table = calloc(28, sizeof *table);
  if (!table) return SYSTEM;
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
