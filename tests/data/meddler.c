/* A module that answers a key event by a command, once: MEDDLER.ON event part db command
 * [argument ...] for the next such event of a key whose name has this part; in that database.
 * MEDDLER.DONE says how often it has.
 *
 * It declares for itself the few functions of the server that it needs, so that it compiles with
 * a C compiler and nothing else. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define ERR 1
#define API_VERSION 1
/* Generic, string, hash, expired, evicted, new. */
#define EVENTS ((1 << 2) | (1 << 3) | (1 << 6) | (1 << 8) | (1 << 9) | (1 << 14))

typedef struct Context Context;
typedef struct String String;
typedef struct CallReply CallReply;
typedef int (*Handler)(Context *, String **, int);
typedef int (*Listener)(Context *, int, const char *, String *);

static int (*SetModuleAttribs)(Context *, const char *, int, int);
static int (*CreateCommand)(Context *, const char *, Handler, const char *, int, int, int);
static CallReply *(*Call)(Context *, const char *, const char *, ...);
static void (*FreeCallReply)(CallReply *);
static int (*ReplyWithLongLong)(Context *, long long);
static const char *(*StringPtrLen)(const String *, size_t *);
static String *(*CreateStringFromString)(Context *, const String *);
static void (*FreeString)(Context *, String *);
static int (*SelectDb)(Context *, int);
static int (*GetSelectedDb)(Context *);
static int (*SubscribeToKeyspaceEvents)(Context *, int, Listener);

static String *words[64];
static int count = 0, kept = 0;
static long long done = 0;

static const char *text(int at) { return StringPtrLen(words[at], NULL); }

static int on_event(Context *context, int type, const char *event, String *key) {
    (void)type;
    if (count == 0 || strcmp(event, text(0)) != 0) return OK;
    if (strstr(StringPtrLen(key, NULL), text(1)) == NULL) return OK;
    int call = count - 4, before = GetSelectedDb(context);
    count = 0;
    done++;
    SelectDb(context, atoi(text(2)));
    CallReply *reply = Call(context, text(3), "!v", words + 4, (size_t)call);
    if (reply != NULL) FreeCallReply(reply);
    SelectDb(context, before);
    return OK;
}

static int on(Context *context, String **arguments, int number) {
    while (kept > 0) FreeString(NULL, words[--kept]);
    count = 0;
    for (int at = 1; at < number && at < 64; at++)
        words[count++] = CreateStringFromString(NULL, arguments[at]);
    kept = count;
    return ReplyWithLongLong(context, done);
}

static int report(Context *context, String **arguments, int number) {
    (void)arguments;
    (void)number;
    return ReplyWithLongLong(context, done);
}

int RedisModule_OnLoad(Context *context, String **arguments, int number) {
    (void)arguments;
    (void)number;
    /* A context begins with the address of the function that finds all others by name. */
    int (*find)(const char *, void *) = (int (*)(const char *, void *))((void **)context)[0];
    find("RedisModule_SetModuleAttribs", &SetModuleAttribs);
    find("RedisModule_CreateCommand", &CreateCommand);
    find("RedisModule_Call", &Call);
    find("RedisModule_FreeCallReply", &FreeCallReply);
    find("RedisModule_ReplyWithLongLong", &ReplyWithLongLong);
    find("RedisModule_StringPtrLen", &StringPtrLen);
    find("RedisModule_CreateStringFromString", &CreateStringFromString);
    find("RedisModule_FreeString", &FreeString);
    find("RedisModule_SelectDb", &SelectDb);
    find("RedisModule_GetSelectedDb", &GetSelectedDb);
    find("RedisModule_SubscribeToKeyspaceEvents", &SubscribeToKeyspaceEvents);
    SetModuleAttribs(context, "meddler", 1, API_VERSION);
    if (CreateCommand(context, "meddler.on", on, "write", 0, 0, 0) != OK) return ERR;
    if (CreateCommand(context, "meddler.done", report, "readonly", 0, 0, 0) != OK) return ERR;
    return SubscribeToKeyspaceEvents(context, EVENTS, on_event);
}
