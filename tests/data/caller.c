/* A module that calls commands of other modules: CALLER.CALL command [argument ...] in its own
 * name, CALLER.AS-USER … in that of its caller, CALLER.AS-MADE-USER … in that of a user that it
 * made;
 * and that forgets memory when told to: CALLER.LEAK, to see that somebody notices.
 *
 * It declares for itself the few functions of the server that it needs, so that it compiles with
 * a C compiler and nothing else. */

#include <stddef.h>
#include <stdlib.h>

#define OK 0
#define ERR 1
#define API_VERSION 1

typedef struct Context Context;
typedef struct String String;
typedef struct CallReply CallReply;
typedef struct User User;
typedef int (*Handler)(Context *, String **, int);

static int (*SetModuleAttribs)(Context *, const char *, int, int);
static int (*CreateCommand)(Context *, const char *, Handler, const char *, int, int, int);
static CallReply *(*Call)(Context *, const char *, const char *, ...);
static int (*ReplyWithCallReply)(Context *, CallReply *);
static void (*FreeCallReply)(CallReply *);
static int (*ReplyWithError)(Context *, const char *);
static const char *(*StringPtrLen)(const String *, size_t *);
static User *(*CreateModuleUser)(const char *);
static int (*SetModuleUserACL)(User *, const char *);
static void (*SetContextUser)(Context *, const User *);

static int call_so(Context *context, String **arguments, int count, const char *format) {
    if (count < 2) return ReplyWithError(context, "ERR wrong number of arguments");
    const char *command = StringPtrLen(arguments[1], NULL);
    CallReply *reply = Call(context, command, format, arguments + 2, (size_t)(count - 2));
    if (reply == NULL) return ReplyWithError(context, "ERR the call was refused");
    ReplyWithCallReply(context, reply);
    FreeCallReply(reply);
    return OK;
}

static int call(Context *context, String **arguments, int count) {
    return call_so(context, arguments, count, "v");
}

static int as_user(Context *context, String **arguments, int count) {
    return call_so(context, arguments, count, "Cv");
}

static int as_made_user(Context *context, String **arguments, int count) {
    static User *made = NULL;
    if (made == NULL) {
        made = CreateModuleUser("made-by-caller");
        SetModuleUserACL(made, "on");
        SetModuleUserACL(made, "allcommands");
        SetModuleUserACL(made, "allkeys");
    }
    SetContextUser(context, made);
    return call_so(context, arguments, count, "Cv");
}

static int leak(Context *context, String **arguments, int count) {
    (void)arguments;
    (void)count;
    char *forgotten = malloc(100);
    return ReplyWithError(context, forgotten == NULL ? "ERR no memory" : "ERR forgotten");
}

int RedisModule_OnLoad(Context *context, String **arguments, int count) {
    (void)arguments;
    (void)count;
    /* A context begins with the address of the function that finds all others by name. */
    int (*find)(const char *, void *) = (int (*)(const char *, void *))((void **)context)[0];
    find("RedisModule_SetModuleAttribs", &SetModuleAttribs);
    find("RedisModule_CreateCommand", &CreateCommand);
    find("RedisModule_Call", &Call);
    find("RedisModule_ReplyWithCallReply", &ReplyWithCallReply);
    find("RedisModule_FreeCallReply", &FreeCallReply);
    find("RedisModule_ReplyWithError", &ReplyWithError);
    find("RedisModule_StringPtrLen", &StringPtrLen);
    find("RedisModule_CreateModuleUser", &CreateModuleUser);
    find("RedisModule_SetModuleUserACL", &SetModuleUserACL);
    find("RedisModule_SetContextUser", &SetContextUser);
    SetModuleAttribs(context, "caller", 1, API_VERSION);
    if (CreateCommand(context, "caller.leak", leak, "readonly", 0, 0, 0) != OK) return ERR;
    if (CreateCommand(context, "caller.as-user", as_user, "write", 0, 0, 0) != OK) return ERR;
    if (CreateCommand(context, "caller.as-made-user", as_made_user, "write", 0, 0, 0) != OK)
        return ERR;
    return CreateCommand(context, "caller.call", call, "write", 0, 0, 0);
}
