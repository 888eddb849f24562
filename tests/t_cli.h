/* The program as scripts meet it: pipes, files, exit codes, what goes to stdout and what to stderr. */

#define MOE MOE_BIN " -m build/demo.gguf "

/* Runs a command and compares its exit code and, unless NULL, all of stdout; `said` must occur in stderr. */
static void check_command(const char *cmd, int code, const char *out, const char *said) {
    char *o = NULL, *e = NULL;
    int rc = run_command(cmd, &o, &e);
    CHECK_INT(rc, code, "`%s`; stderr: %.300s", cmd, sb_cstr(&e));
    if (out) CHECK_STR(sb_cstr(&o), out, "stdout of `%s`", cmd);
    if (said) CHECK_HAS(sb_cstr(&e), said, "stderr of `%s`", cmd);
    arrfree(o);
    arrfree(e);
}

static void test_cli_pipe(void) {
    check_command("echo 'What is 7 squared? One word.' | " MOE "--greedy --think off", 0, "49\n", "tok/s");
    check_command("printf 'What is 7 squared? One word.' | " MOE "--greedy --think off --cpu-ref", 0, "49\n", NULL);
    check_command("echo 'What is 7 squared? One word.' | " MOE "--greedy", 0, "49\n", NULL); /* thinking is left out */
    check_command("echo 'What is 7 squared? One word.' | " MOE "--greedy --show-think on", 0,
                  "[thinking]\n7 squared is 7 times 7, which is 49.\n[answer]\n49\n", NULL);
    check_command(MOE "--greedy --think off -p 'What is 7 squared? One word.' </dev/null", 0, "49\n", NULL);
    check_command(MOE "--greedy --think off --cpu --moe-act fp4 -p 'What is 7 squared? One word.'", 0, "49\n",
                  "--moe-act has no effect");
    check_command(MOE "--greedy --think off -p 'What is 7 squared? One word.' <&-", 0, "49\n", NULL);
    check_command(
        IN_DIR("printf 'What is 7 squared? One word.\\n' >@/q.txt; " MOE "--greedy --think off -f @/q.txt </dev/null"),
        0, "49\n", "tok/s");
    check_command("MOE_MODEL=build/demo.gguf " MOE_BIN
                  " --greedy --think=off -p 'What is 7 squared? One word.' </dev/null",
                  0, "49\n", NULL);
    /* stdin first, a blank line, then -p: exactly the same prompt in one piece */
    char *a = NULL, *b = NULL;
    run_command("echo 'My name is Zoe.' | " MOE "--greedy --think off -n 12 -p 'What is my name?'", &a, NULL);
    run_command("printf 'My name is Zoe.\\n\\nWhat is my name?' | " MOE "--greedy --think off -n 12", &b, NULL);
    CHECK(arrlen(a) > 1 && !strcmp(sb_cstr(&a), sb_cstr(&b)), "'%s' and '%s'", sb_cstr(&a), sb_cstr(&b));
    arrfree(a);
    arrfree(b);
}

/* Layers of a file that do not run are said. */
static void test_cli_unused(void) {
    check_command(MOE_BIN " --info --synth k-exaone-236b-a23b:block_count=5,nextn_predict_layers=1,"
                          "attention.sliding_window_pattern=1:1:1:0 </dev/null | grep ^layers",
                  0, "layers        4 (1 dense), 0 for multi-token prediction\n",
                  "(1) that are not used: moe has no reference for them\n");
}

/* A model without experts: what is said of experts, and that options about them are idle. */
static void test_cli_dense(void) {
#define DENSE MOE_BIN " -m build/fixtures/qwen3.gguf "
    check_command(DENSE "--info | grep -E 'expert|feed|layers'", 0,
                  "layers        3 (3 dense), 0 for multi-token prediction\nfeed-forward  dense, width 192\n", NULL);
    check_command(DENSE "--plan | grep -E 'model |verdict|pruned|expert'", 0,
                  "model       qwen3: 3 layers, dense\nverdict     fits\n"
                  "GB per token     experts   backbone      cache       head        sum\n",
                  NULL);
    check_command(DENSE "--plan --gpus 1x8@500 --vram-reserve 1000000 | grep -E 'verdict|prune|host|disk' | cut -c1-32",
                  0, "verdict     does not fit: short \n", NULL);
    check_command(DENSE "--cpu --n-cpu-moe 2 -p x -n 1 --greedy >/dev/null", 0, NULL,
                  "--n-cpu-moe has no effect: the model is dense");
    check_command(DENSE "--cpu --expert-memory 5 -p x -n 1 --greedy >/dev/null", 0, NULL,
                  "--expert-memory has no effect with a dense model");
    check_command(IN_DIR("head -c 3000 README.md | " DENSE "--cpu --calibrate @/x -o @/x.json"), 1, "",
                  "'build/fixtures/qwen3.gguf' has no routed experts");
#undef DENSE
    /* of a dense model --quantize means the feed-forwards, and without it --backbone does, too */
    static const char types[] = CONVERT_BIN " tests/fixtures/qwen3 --dry-run %s | "
                                            "awk '$1 ~ /^blk.0.(attn_q|ffn_up).weight$/ {print $2}'";
    char cmd[256];
    snprintf(cmd, sizeof cmd, types, "--backbone q8_0");
    check_command(cmd, 0, "Q8_0\nQ8_0\n", NULL);
    snprintf(cmd, sizeof cmd, types, "--backbone q8_0 --quantize nvfp4");
    check_command(cmd, 0, "Q8_0\nNVFP4\n", NULL);
    snprintf(cmd, sizeof cmd, types, "--quantize nvfp4");
    check_command(cmd, 0, "BF16\nNVFP4\n", NULL);
}

/* Runs a command; *text becomes all of stdout. Returns the hash that ends the statistics on stderr, malloc'ed. */
static char *answer_hash(const char *cmd, char **text) {
    char *said = NULL;
    CHECK_INT(run_command(cmd, text, &said), 0, "`%s`", cmd);
    const char *at = strstr(sb_cstr(&said), "logits #");
    char *hash = CHECK(at, "no hash in '%s'", said) ? xstrndup(at + 7, 9) : xstrdup("");
    arrfree(said);
    return hash;
}

/* -sys and --system-file are the system message of the template: the logits are those of the prompt that --render gives.
 * */
static void test_cli_system(void) {
    char *out[4] = {NULL}, *hash[4];
    check_command(IN_DIR("printf 'Answer briefly.\\n' >@/s.txt"), 0, NULL, NULL);
    check_command(IN_DIR("printf '%s' '{\"messages\": [{\"role\": \"system\", \"content\": \"Answer briefly.\"}, "
                         "{\"role\": \"user\", \"content\": \"My name is Zoe.\"}], "
                         "\"add_generation_prompt\": true, \"enable_thinking\": false}' | " MOE
                         "--render >@/r.txt; grep -c 'Answer briefly' @/r.txt"),
                  0, "1\n", NULL);
    hash[0] = answer_hash(MOE "-v --greedy --think off -n 8 -p 'My name is Zoe.' -sys 'Answer briefly.'", &out[0]);
    hash[1] =
        answer_hash(IN_DIR(MOE "-v --greedy --think off -n 8 -p 'My name is Zoe.' --system-file @/s.txt"), &out[1]);
    hash[2] = answer_hash(IN_DIR("{ cat @/r.txt; echo; } | " MOE "-v --greedy --raw --special -n 8"), &out[2]);
    hash[3] = answer_hash(MOE "-v --greedy --think off -n 8 -p 'My name is Zoe.'", &out[3]);
    CHECK_STR(hash[1], hash[0], "-sys and --system-file");
    CHECK_STR(hash[2], hash[0], "-sys and the rendered prompt: '%s', '%s'", sb_cstr(&out[0]), sb_cstr(&out[2]));
    CHECK(strcmp(hash[3], hash[0]), "-sys changes nothing");
    for (int i = 0; i < 4; i++) {
        free(hash[i]);
        arrfree(out[i]);
    }
}

static void test_cli_lines(void) {
    check_command("printf 'What is 7 squared? One word.\\n\\nWhat is the capital of France?\\nWhat is 7 "
                  "squared? One word.' | " MOE "--greedy --think off --lines",
                  0, "49\nThe capital of France is Paris.\n49\n", NULL);
    check_command("printf 'Once upon a\n\nOnce upon a' | " MOE "--raw --lines --greedy -n 1", 0, " time\n time\n",
                  NULL);
}

/* A line that cannot be answered does not keep the others from it. */
static void test_cli_bad_line(void) {
    check_command("printf 'Once upon a\\n%0999d\\nOnce upon a\\n' 0 | " MOE "--raw --lines --greedy -n 1 -c 64", 1,
                  " time\n time\n", "line 2: ");
    check_command("printf '\\n\\n\\377\\n' | " MOE "--lines -n 1", 1, "", "line 3: the message is not UTF-8 at byte 0");
    check_command("printf '' | " MOE "--raw -p ''", 1, "", "no tokens");
}

/* --jsonl: an answer or an error for every request, in their order, with its id. */
static void test_cli_jsonl(void) {
    static const char in[] =
        "{\"id\":\"a\",\"prompt\":\"What is 7 squared? One word.\",\"temperature\":0}\n\n"
        "{\"prompt\":\"What is 7 squared? One word.\",\"stop\":[\"9\",\"nothing\"],\"seed\":null}\n"
        "{\"id\":[4],\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\","
        "\"content\":\"Tell me a story.\"}],\"max_tokens\":7}\n"
        "{\"id\":5,\"prompt\":\"hi\",\"n\":2}\n"
        "{\"id\":6\n"
        "{\"id\":7,\"prompt\":\"hi\",\"temperature\":-1}\n"
        "{\"id\":8,\"messages\":[{\"role\":\"robot\",\"content\":\"x\"}]}\n"
        "{\"id\":9,\"prompt\":\"hi\",\"stop\":\"\"}\n"
        "{\"id\":10,\"prompt\":\"hi\",\"messages\":[]}\n"
        "{\"id\":11,\"messages\":[{\"role\":\"assistant\",\"content\":\"x\"}]}\n"
        "{\"id\":12,\"prompt\":\"caf\xe9\"}\n";
    static const struct {
        const char *id, *text, *reasoning, *finish, *error;
        int prompt, made; /* tokens */
    } want[] = {{"\"a\"", "49", "7 squared is 7 times 7, which is 49.", "stop", NULL, 19, 19},
                {"3", "4", "7 squared is 7 times 7, which is 49.", "stop", NULL, 19, 19},
                {"[4]", "", "The user wants a story. I", "length", NULL, 23, 7},
                {"5", NULL, NULL, NULL, "\"n\": 2 is not supported: a request gets one answer", 0, 0},
                {"6", NULL, NULL, NULL, "byte 7", 0, 0},
                {"7", NULL, NULL, NULL, "\"temperature\": expected a number from 0 to 100", 0, 0},
                {"8", NULL, NULL, NULL,
                 "messages[0]: the role must be system, developer, user, assistant or tool, found robot", 0, 0},
                {"9", NULL, NULL, NULL, "\"stop\" must be", 0, 0},
                {"10", NULL, NULL, NULL, "either \"prompt\" or \"messages\"", 0, 0},
                {"11", NULL, NULL, NULL, "the last message must be the user's", 0, 0},
                {"12", NULL, NULL, NULL, "byte 0xe9", 0, 0}};
    enum { N = sizeof want / sizeof *want };
    char *out = NULL, *said = NULL, path[512], command[700];
    snprintf(path, sizeof path, "%s/requests.jsonl", test_dir());
    write_test_file(path, in, sizeof in - 1);
    snprintf(command, sizeof command, MOE "--greedy --jsonl <%s", path);
    CHECK_INT(run_command(command, &out, &said), 1, "a request failed");
    CHECK_STR(sb_cstr(&said), "", "errors are lines of stdout");
    const char *line = sb_cstr(&out);
    for (int i = 0; i < N; i++) {
        const size_t n = strcspn(line, "\n");
        json_t *o = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL), *usage = json_object_get(o, "usage");
        char *id = json_dumps(json_object_get(o, "id"), JSON_ENCODE_ANY | JSON_COMPACT);
        const char *error = json_string_value(json_object_get(o, "error"));
        if (!CHECK(o && id && line[n] == '\n', "line %d is '%.*s'", i + 1, (int)n, line)) break;
        CHECK_STR(id, want[i].id, "line %d", i + 1);
        if (want[i].error) {
            CHECK(error && strstr(error, want[i].error) && json_object_size(o) == 2, "'%.*s'", (int)n, line);
        } else {
            CHECK_STR(json_string_value(json_object_get(o, "text")), want[i].text, "line %d", i + 1);
            CHECK_STR(json_string_value(json_object_get(o, "reasoning")), want[i].reasoning, "line %d", i + 1);
            CHECK_STR(json_string_value(json_object_get(o, "finish")), want[i].finish, "line %d", i + 1);
            CHECK_INT((int)json_integer_value(json_object_get(usage, "prompt_tokens")), want[i].prompt, "line %d",
                      i + 1);
            CHECK_INT((int)json_integer_value(json_object_get(usage, "completion_tokens")), want[i].made, "line %d",
                      i + 1);
            CHECK_INT((int)json_integer_value(json_object_get(usage, "cached_tokens")), 0, "line %d", i + 1);
        }
        free(id);
        json_decref(o);
        line += n + 1;
    }
    CHECK(!*line, "more lines than requests: '%s'", line);
    check_command("echo '{\"prompt\":\"Once upon a\",\"max_tokens\":1}' | " MOE "--raw --jsonl --greedy", 0,
                  "{\"id\":1,\"text\":\" time\",\"finish\":\"length\",\"usage\":{\"prompt_tokens\":3,"
                  "\"cached_tokens\":0,\"completion_tokens\":1}}\n",
                  NULL);
    arrfree(out);
    arrfree(said);
}

/* Answers of --lines have the bits that they have alone, though the beginning that prompts share is computed once. */
static void test_cli_alone(void) {
    static const char *const lines[] = {"What is 7 squared?", "What is 8 squared? One word.", "Tell me a story.",
                                        "What is 7 squared? One word.", "What is 7 squared?"};
    enum { N = sizeof lines / sizeof *lines };
    char hash[N][2][16], *said = NULL, path[512], command[900];
    snprintf(path, sizeof path, "%s/lines.txt", test_dir());
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < N; i++) {
            char *all = NULL;
            for (int j = k ? i : 0; j < (k ? i + 1 : N); j++) sb_printf(&all, "%s\n", lines[j]);
            write_test_file(path, all, arrlenu(all));
            arrfree(all);
            snprintf(command, sizeof command,
                     MOE "--lines --greedy -n 12 --verbose --system 'Be brief. %090d' <%s 2>&1 | grep -o 'logits #.*'",
                     0, path);
            CHECK_INT(run_command(command, &said, NULL), 0, "%s", command);
            const char *at = sb_cstr(&said);
            for (int j = k ? i : 0; j < (k ? i + 1 : N); j++, at += strcspn(at, "\n") + (*at != 0))
                snprintf(hash[j][k], sizeof *hash[j], "%.9s", at + strcspn(at, "#"));
            arrsetlen(said, 0);
            if (!k) break;
        }
    for (int i = 0; i < N; i++) CHECK_STR(hash[i][0], hash[i][1], "line %d, among others and alone", i + 1);
    CHECK(strcmp(hash[0][0], hash[1][0]) && *hash[0][0] == '#', "hashes: %s, %s", hash[0][0], hash[1][0]);
    arrfree(said);
}

/* --continue and --load with a prompt: one turn of that conversation, which becomes the last one. */
static void test_cli_continue(void) {
    check_command(IN_DIR("mkdir -p @/home; rm -rf @/home/.moe; HOME=@/home " MOE "--greedy --continue -p hi"), 1, "",
                  "there is no conversation to continue");
    check_command(IN_DIR("HOME=@/home " MOE
                         "--greedy -p 'What is 7 squared? One word.' --load tests/corpus/session/header.jsonl"),
                  1, "", "line 1 is not the header");
    check_command(IN_DIR("printf '{\"moe\":1}\n' >@/new.jsonl; HOME=@/home " MOE
                         "--greedy -p 'What is 7 squared? One word.' --load @/new"),
                  0, "49\n", "prompt 19 ");
    check_command(IN_DIR("echo 'Tell me a story.' | HOME=@/home " MOE "--greedy --continue -n 3"), 0, NULL,
                  "prompt 19 "); /* 36 without the saved state */
    check_command(IN_DIR("wc -l <@/new.jsonl; grep -c '\"role\":\"user\"' @/home/.moe/last.jsonl"), 0, "1\n2\n", NULL);
    check_command(MOE "--continue --lines", 2, "", "--continue and --lines cannot be combined");
    check_command(MOE "--load x --raw -p hi", 2, "", "--load and --raw cannot be combined");
    check_command(MOE "--load x --continue", 2, "", "--continue and --load cannot be combined");
}

static void test_cli_raw(void) {
    check_command("printf 'Once upon a' | " MOE "--raw --greedy -n 1", 0, " time", NULL);
    check_command(MOE
                  "--greedy --ids "
                  "8188,361,198,553,313,220,22,1773,30,652,1202,13,8189,198,8188,371,198,8190,285,8191,285 </dev/null",
                  0, "49", NULL);
    check_command(MOE "--greedy --ids "
                      "8188,361,198,553,313,220,22,1773,30,652,1202,13,8189,198,8188,371,198,8190,198 </dev/null",
                  0, "7 squared is 7 times 7, which is 49.\n</think>\n\n49", NULL);
    check_command(MOE "--ids 99999 </dev/null", 2, "", "99999");
    check_command(MOE_BIN " -m tests/corpus/gguf/valid-qwen3moe.gguf --ids 0,1 -n 1 --greedy </dev/null", 0, NULL,
                  "1 tok"); /* no template is needed */
    check_command(MOE "--ids 1,x </dev/null", 2, "", "x");
}

static void test_cli_tokenize(void) {
    check_command("printf 'What is 7 squared? One word.' | " MOE "--tokenize", 0,
                  "553 313 220 22 1773 30 652 1202 13\n", NULL);
    check_command("printf '<|im_end|>' | " MOE "--tokenize --special", 0, "8189\n", NULL);
    check_command("printf '<think>' | " MOE "--tokenize", 0, "8190\n", NULL);
    check_command("printf '' | " MOE "--tokenize", 0, "\n", NULL);
    char *out = NULL;
    run_command("printf '<|im_end|>' | " MOE "--tokenize", &out, NULL);
    CHECK(arrlen(out) > 5 && !strstr(sb_cstr(&out), "8189"), "a control token in plain text became %s", sb_cstr(&out));
    arrfree(out);
}

static void test_cli_render(void) {
    check_command("printf "
                  "'{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"add_generation_prompt\":true,"
                  "\"enable_thinking\":false}' | " MOE "--render",
                  0, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", NULL);
    check_command(
        IN_DIR("printf '{{ 1 + }}' >@/t.jinja; printf '{}' | " MOE_BIN " --render --chat-template-file @/t.jinja"), 1,
        "", "line 1");
    check_command(IN_DIR("printf \"{{ raise_exception('no way') }}\" >@/t.jinja; printf '{}' | " MOE_BIN
                         " --render --chat-template-file @/t.jinja"),
                  1, "", "no way");
    check_command("printf '{}' | " MOE_BIN " --render --chat-template-file /dev/null", 0, "", NULL);
    check_command("printf '[]' | " MOE "--render", 1, "", "not a JSON object");
    check_command("printf '{\"a\":}' | " MOE "--render", 1, "", "line 1");
    check_command("printf '{\"messages\":[],\"now\":3}' | " MOE "--render", 1, "", "\"now\" is not a string");
}

static void test_cli_usage(void) {
    check_command(MOE_BIN " --nonsense </dev/null", 2, "", "unknown option '--nonsense'");
    check_command(MOE_BIN " nonsense </dev/null", 2, "", "-p");
    check_command(MOE_BIN " -p hi </dev/null", 2, "", "no model");
    check_command(MOE "</dev/null", 2, "", "stdin is empty");
    check_command(MOE "--lines <tests", 1, "", "cannot read 'stdin': Is a directory");
    check_command(MOE "--kv q4 -p hi </dev/null", 2, "", "bf16|fp8|f32");
    check_command(MOE "-c 12x -p hi </dev/null", 2, "", "12x");
    check_command(MOE "--temp", 2, "", "--temp needs a value: T");
    check_command(IN_DIR(MOE_BIN " -m @/nothing.gguf -p hi </dev/null"), 1, "", "No such file");
    check_command(MOE_BIN " -m Makefile -p hi </dev/null", 1, "", "not a GGUF file");
    static const struct {
        const char *args, *said;
        int rc;
    } t[] = {{"--tokenize -p hi", "--tokenize and -p cannot be combined", 2},
             {"--logits x.npy --perplexity Makefile", "--logits and --perplexity cannot be combined", 2},
             {"--logits x.npy --bench", "--logits and --bench cannot be combined", 2},
             {"--logits x.npy --lines", "--logits and --lines cannot be combined", 2},
             {"--lines -f Makefile", "--lines and -f cannot be combined", 2},
             {"--ids 1 -p hi", "-p and --ids cannot be combined", 2},
             {"-sys a --system-file Makefile -p hi", "--system and --system-file cannot be combined", 2},
             {"--logits '' --ids 1", "--logits needs the name of a file", 2},
             {"-hv", "unknown option '-hv'", 2},
             {"--temprature 1", "unknown option '--temprature': did you mean --temperature? (see --help)", 2},
             {"--topk=1", "unknown option '--topk=1': did you mean --top-k? (see --help)", 2},
             {"--verbos", "unknown option '--verbos': did you mean --verbose? (see --help)", 2},
             {"--xyzzy", "unknown option '--xyzzy' (see --help)", 2},
             {"--tensor-parallel-size 2", "--tensor-parallel-size: use --tp N", 2},
             {"--max-model-len=9", "--max-model-len=9: use -c N", 2},
             {"--perplexity Makefile --depth 40", "--depth works only with --needle", 2},
             {"-p hi --special", "--special works only with --raw or --tokenize", 2},
             {"-p hi --json", "--json works only with --plan or --doctor", 2},
             {"-p hi -o x.json", "--output works only with --calibrate", 2},
             {"-mbuild/demo.gguf", "unknown option '-mbuild/demo.gguf'", 2},
             {"-n1x", "-n1x: expected a whole number from -1", 2},
             {"-c 0x10", "-c 0x10: expected a whole number from 0", 2},
             {"--temp=nan", "--temp=nan: expected a number from 0 to 100", 2},
             {"-ctk q8_0", "-ctk q8_0: expected bf16|fp8|f32", 2},
             {"-ctk bf16 -ctv fp8", "-ctv fp8: keys and values share one type, already set to bf16", 2},
             {"-hf a/b", "-hf: moe does not download: hf download", 2},
             {"--quiet -v", "--quiet and --verbose cannot be combined", 2},
             {"build/demo.gguf", "unexpected argument 'build/demo.gguf': the model is 'build/demo.gguf'", 2},
             {"Makefile", "unexpected argument 'Makefile': use -p for a prompt, -m for a model", 2},
             {"-c 99999999999 -p hi", "a whole number from 0 to 268435456", 2},
             {"--synth qwen3-30b-a3b:1abc --info", "layers=N from 1 to 48", 2},
             {"--synth bert --info", "known shapes are qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, ", 2},
             {"--synth qwen3-30b --info", "did you mean qwen3-30b-a3b?", 2},
             {"--synth Zai/glm4.7 --info", "did you mean glm-4.7?", 2},
             {"--synth kimi-k2: --info", "layers=N from 1 to 61, experts=M from 8 to 384, backbone=bf16", 2},
             {"--synth deepseek-v3:layers=62 --info", "layers=N from 1 to 61", 2},
             {"--synth deepseek-v3:experts=20 --info", "experts=M from 16 to 256 in steps of 8", 2},
             {"--synth qwen3-30b-a3b:layers=2,experts=7 --info", "experts=M from 8 to 128", 2},
             {"--synth qwen3-30b-a3b:experts=16x --info", "experts=M from 8 to 128", 2},
             {"--synth qwen3-30b-a3b --shard 2/2 --info", "R from 0 to N - 1", 2},
             {"--synth qwen3-30b-a3b --shard 0/9 --info", "N from 1 to 8", 2},
             {"--synth qwen3-30b-a3b --shard 0/3 --info", "32 attention heads, not a multiple of 3", 2},
             {"--synth qwen3-30b-a3b --shard 0/8 --info", "768 columns of the experts, not a multiple of 512", 2},
             {"--shard 0/2 -p hi", "--shard works only with --synth", 2},
             {"--profile -p hi", "--profile works only with --bench", 2},
             {"--cpu --bench --profile --tp 2", "--profile works only with a single rank, found 2", 2},
             {"--bench -c 15", "too small for --bench: expected at least 16", 1},
             {"--smoke -c 50", "too small for --smoke: expected at least 192", 1},
             {"--needle 99999999 -c 500", "99,999,999 tokens, and the context holds 500: shorten the prompt", 1},
             {"-c 16 -p 'What is 7 squared? One word.'", "restart with -c 19 (7.9 KiB more)", 1}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[256];
        snprintf(cmd, sizeof cmd, MOE "%s </dev/null", t[i].args);
        check_command(cmd, t[i].rc, "", t[i].said);
    }
    check_command(MOE_BIN " --help", 0, NULL, NULL);
    check_command("printf 'a\\377b' | " MOE, 1, "", "the message is not UTF-8 at byte 1");
    check_command(IN_DIR("printf 'a\\377b' | " MOE "--logits @/x.npy"), 1, "", "the prompt is not UTF-8 at byte 1");
    check_command(MOE "-sys \"$(printf 'a\\377b')\" -p hi </dev/null", 1, "",
                  "the system message is not UTF-8 at byte 1");
    check_command(IN_DIR("printf 'a\\0b' >@/s.txt; " MOE "--system-file @/s.txt -p hi </dev/null"), 1, "",
                  "the system message has a NUL byte, byte ");
    check_command(MOE "-c 1 --perplexity Makefile </dev/null", 1, "", "too short");
    check_command(IN_DIR("yes '' | head -200 >@/hay.txt; " MOE "--needle 100 --haystack @/hay.txt </dev/null"), 1, "",
                  "the haystack is not");
}

/* The number of columns of the longest of n lines; *rows becomes the number of lines. */
static int text_columns(const char *text, int *rows) {
    int columns = 0;
    for (*rows = 0; *text; ++*rows) {
        const int n = (int)strcspn(text, "\n");
        columns = n > columns ? n : columns;
        text += n + (text[n] == '\n');
    }
    return columns;
}

static void test_cli_version(void) {
    char *out = NULL, want[64];
    int rows;
    CHECK_INT(run_command(MOE_BIN " --version", &out, NULL), 0, "--version");
    const int columns = text_columns(sb_cstr(&out), &rows);
    snprintf(want, sizeof want, "moe %s (CPU: %s; GPU: ", MOE_VERSION, kernels_choose()->name);
    CHECK(!strncmp(out, want, strlen(want)), "'%s' does not begin with '%s'", out, want);
    CHECK(rows <= 3 && columns <= 100, "%d lines, %d columns", rows, columns);
    arrfree(out);
}

/* Whether a text of help lists an option once, with its help. Line breaks and indentation do not count. */
static bool help_has(const char *text, const struct option *o) {
    char *flat = NULL, left[64];
    const int n = o->also ? (int)strcspn(o->also, "|") : 0;
    if (n && o->also[1] != '-') snprintf(left, sizeof left, "\n  %.*s, --%s ", n, o->also, o->name);
    else snprintf(left, sizeof left, "\n      --%s ", o->name);
    const char *at = strstr(text, left);
    for (const char *p = at ? at + strlen(left) : ""; *p; p++) {
        if (*p == '\n' && p[1] != ' ') break;
        const size_t blank = strspn(p, "\n ");
        arrput(flat, blank ? ' ' : *p);
        if (blank) p += blank - 1;
    }
    const bool found = at && strstr(sb_cstr(&flat), o->help) && !strstr(at + 1, left);
    arrfree(flat);
    return found;
}

/* --help is short and has what most people need, --help all has every option, --MODE --help those of a mode. All fit 80
 * columns. */
static void test_cli_help(void) {
    char *some = NULL, *all = NULL, cmd[128];
    int lines;
    CHECK(run_command(MOE_BIN " --help", &some, NULL) == 0, "--help failed");
    CHECK(run_command(MOE_BIN " --help all", &all, NULL) == 0, "--help all failed");
    int longest = text_columns(sb_cstr(&some), &lines);
    CHECK(lines <= 62 && longest <= 80, "%d lines, the longest has %d columns", lines, longest);
    longest = text_columns(sb_cstr(&all), &lines);
    CHECK(longest <= 80, "--help all: the longest line has %d columns", longest);
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        char *one = NULL;
        if (!o->name) continue;
        CHECK(help_has(all, o), "--help all and --%s", o->name);
        CHECK(help_has(some, o) == (!o->of && !o->rare), "--help and --%s", o->name);
        if (!o->details) continue;
        sb_puts(&one, "\n");
        snprintf(cmd, sizeof cmd, MOE_BIN " --%s --help", o->name);
        CHECK(run_command(cmd, &one, NULL) == 0, "%s failed", cmd);
        longest = text_columns(sb_cstr(&one), &lines);
        CHECK(help_has(one, o) && longest <= 80, "%s: %d columns", cmd, longest);
        for (int k = 0; k < N_OPTIONS; k++)
            if (options[k].of && list_has(options[k].of, o->name))
                CHECK(help_has(one, &options[k]), "%s: --%s is missing", cmd, options[k].name);
        for (size_t k = 0; !strcmp(o->name, "synth") && k < sizeof synths / sizeof *synths; k++)
            CHECK(strstr(one, synths[k].name), "%s does not name %s", cmd, synths[k].name);
        arrfree(one);
    }
    check_command(MOE_BIN " -h", 0, some, NULL);
    static const char *const converters[] = {CONVERT_BIN " --help", REAP_BIN " --help"};
    for (int i = 0; i < 2; i++) {
        char *text = NULL;
        CHECK(run_command(converters[i], &text, NULL) == 0, "%s", converters[i]);
        longest = text_columns(sb_cstr(&text), &lines);
        CHECK(longest <= 80, "%s: %d columns", converters[i], longest);
        arrfree(text);
    }
    check_command(MOE_BIN " -p --help -n 1 -m build/nothing.gguf </dev/null", 1, "", "nothing.gguf");
    arrfree(some);
    arrfree(all);
}

/* Parses a command line in a child. The exit code; what it prints is appended to *said. `then` may look at the
 * settings: the child's exit code is 0 if it returns true, else 99. */
static int parse_in_child(char **argv, bool (*then)(const struct settings *s, char **argv), char **said) {
    int to[2], argc = 0, status = -1;
    while (argv[argc]) argc++;
    if (!CHECK(!pipe(to), "%s", strerror(errno))) return -1;
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) {
        struct settings set;
        char err[ERR_MAX];
        dup2(to[1], 2);
        close(to[0]);
        close(to[1]);
        settings_init(&set);
        if (options_parse(&set, argc, argv, err)) die_usage("%s", err);
        fflush(stderr);
        _exit(then(&set, argv) ? 0 : 99);
    }
    close(to[1]);
    read_fd(to[0], said);
    close(to[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The option after was read as an option, and the value was read as no model. */
static bool lines_follow(const struct settings *s, char **argv) {
    return s->lines && (!s->model || option_by_argument(argv[1]) == option_find("model"));
}

/* Every option of llama-cli is taken, ignored with a note, or refused with a reason. tests/golden/llama_cli_options.txt
 * has a name on each line, and a value where it takes one. */
static void test_cli_llama(void) {
    char *text = NULL, err[ERR_MAX];
    int n = 0;
    unsetenv("MOE_MODEL");
    if (!CHECK(read_file("tests/golden/llama_cli_options.txt", &text, err) == 0, "%s", err)) return;
    sb_cstr(&text);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), n++) {
        char *said = NULL, *blank = strchr(line, ' ');
        char *argv[] = {(char *)"moe", line, blank ? blank + 1 : (char *)"--lines", blank ? (char *)"--lines" : NULL,
                        NULL};
        if (blank) *blank = 0;
        const int rc = parse_in_child(argv, lines_follow, &said);
        char takes;
        const struct llama_option *f = llama_option_find(line, argv[2], &takes);
        const bool known = option_by_argument(line) || (f && f->as); /* as: it stands for an option */
        CHECK(rc == 0 || rc == EXIT_USAGE, "%s: exit code %d: %s", line, rc, sb_cstr(&said));
        if (rc || !known) CHECK_HAS(sb_cstr(&said), line, "the reason of %s", line);
        CHECK(!strstr(sb_cstr(&said), "unknown option") && !strstr(sb_cstr(&said), "unexpected"), "%s", sb_cstr(&said));
        arrfree(said);
    }
    CHECK(n > 350, "only %d options", n);
    arrfree(text);
}

static bool names_counted(const struct settings *s, char **argv) {
    (void)argv;
    return s->n_predict == 16 && s->n_ctx == 4096 && s->seed == 7 && s->temp == 1.5 && !s->greedy && s->kv == KV_FP8 &&
           s->think_budget == 0 && s->cpu && s->raw && !strcmp(s->prompt, "a\nb\\x41A") && !strcmp(s->system, "-st") &&
           !strcmp(s->model, "x");
}

static bool last_counted(const struct settings *s, char **argv) {
    (void)argv;
    return s->greedy && s->temp == 1.5 && s->threads <= processors();
}

/* Other names, glued numbers, and which one of two options counts. */
static void test_cli_options(void) {
    static const char *const seven[] = {"moe",
                                        "-n16",
                                        "-c4096",
                                        "-s",
                                        "7",
                                        "--greedy",
                                        "--temperature",
                                        "1.5",
                                        "-ctk",
                                        "fp8",
                                        "--cache_type_v=fp8",
                                        "--reasoning-budget",
                                        "0",
                                        "-ngl",
                                        "0",
                                        "-no-cnv",
                                        "-e",
                                        "-p",
                                        "a\\nb\\\\x41\\x41",
                                        "-sys",
                                        "-st",
                                        "-fa",
                                        "-m",
                                        "x",
                                        NULL};
    static const char *const greedy[] = {"moe", "--temp", "1.5", "--greedy", "-t", "1000", NULL};
    char *said = NULL, err[ERR_MAX];
    struct settings set;
    settings_init(&set);
    set.greedy = true;
    CHECK(!option_set(&set, "temp", "0", err) && set.greedy, "/set temp 0");
    CHECK(!option_set(&set, "temp", "1.5", err) && !set.greedy, "/set temp 1.5");
    CHECK(!option_set(&set, "greedy", "on", err) && set.greedy, "/set greedy on");
    CHECK_INT(parse_in_child((char **)seven, names_counted, &said), 0, "%s", sb_cstr(&said));
    CHECK_HAS(sb_cstr(&said), "-fa has no effect", "the notes");
    CHECK_INT(parse_in_child((char **)greedy, last_counted, &said), 0, "%s", sb_cstr(&said));
    CHECK_HAS(sb_cstr(&said), "-t 1000: this machine has", "the notes");
    arrfree(said);
    check_command(MOE_BIN " build/demo.gguf --greedy --think off -p 'What is 7 squared? One word.' </dev/null", 0,
                  "49\n", "tok/s");
    check_command("echo 'What is 7 squared? One word.' | " MOE "--greedy --think off -f -", 0, "49\n", "tok/s");
    check_command(MOE_BIN " --list-devices", 0, NULL, NULL);
    /* the last of both counts: another seed, another text */
    char *a = NULL, *b = NULL;
    run_command(MOE "--greedy --temp 20 --top-k 0 --top-p 1 -s 1 -n 8 -p hi </dev/null", &a, NULL);
    run_command(MOE "--greedy --temp 20 --top-k 0 --top-p 1 -s 2 -n 8 -p hi --show-think on </dev/null", &b, NULL);
    CHECK(arrlen(b) && strcmp(sb_cstr(&a), sb_cstr(&b)), "--greedy outlives --temp: '%s'", sb_cstr(&b));
    arrfree(a);
    arrfree(b);
}

/* What is said where -m names no GGUF file, and where it is left out. */
static void test_cli_find_model(void) {
    char *said = NULL;
    check_command(IN_DIR("mkdir -p @/hf @/d/.moe/models; echo {} >@/hf/config.json; cp build/demo.gguf @/d/a.gguf; "
                         "ln -s ../../a.gguf @/d/.moe/models/b.gguf; touch @/d/c-00002-of-00002.gguf; "
                         "printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:0\\n' >@/lfs.gguf"),
                  0, NULL, NULL);
    check_command(MOE_BIN " -m nvidia/Some-Model -p hi </dev/null", 1, "",
                  SANITIZED ? "then moe-convert Some-Model -o Some-Model.gguf"
                            : "build/moe-convert Some-Model -o Some-Model.gguf");
    check_command(IN_DIR(MOE_BIN " @/hf/ -p hi </dev/null"), 1, "", "/hf.gguf");
    check_command(IN_DIR(MOE_BIN " -m @/d --info </dev/null"), 1, "", "a.gguf");
    check_command(IN_DIR("MOE_MODEL=@/d " MOE_BIN " -p hi </dev/null"), 1, "", "is a directory: expected a GGUF file");
    check_command(IN_DIR(MOE_BIN " -m @/lfs.gguf -p hi </dev/null"), 1, "", "is a Git LFS pointer: run git lfs pull");
    check_command(
        IN_DIR("cp convert/demo/*.json @/hf; cp @/lfs.gguf @/hf/model-00001-of-00002.safetensors; " CONVERT_BIN
               " @/hf -o @/x.gguf"),
        1, "", "model-00001-of-00002.safetensors' is a Git LFS pointer: run git lfs pull");
    check_command(MOE_BIN " -m Makefile -p hi </dev/null", 1, "", "not a GGUF file (starts with");
    CHECK_INT(run_command(IN_DIR("t=$PWD; cd @/d; HOME=. $t/" MOE_BIN " </dev/null"), NULL, &said), EXIT_USAGE,
              "no model");
    static const char *const want[] = {"no model: give -m", "  -m a.gguf ", "  -m ./.moe/models/b.gguf ",
                                       "hf download "};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) CHECK_HAS(sb_cstr(&said), want[i], "moe without a model");
    CHECK(!strstr(sb_cstr(&said), "00002"), "the second part of a model is listed");
    arrfree(said);
}

/* --quiet leaves errors only. */
static void test_cli_quiet(void) {
    char *said = NULL;
    CHECK_INT(
        run_command(MOE "-q --jinja -t 1000 --greedy --think off --cpu --moe-act fp4 -p hi </dev/null", NULL, &said), 0,
        "%s", sb_cstr(&said));
    CHECK_STR(sb_cstr(&said), "", "stderr of --quiet");
    arrfree(said);
    check_command(MOE "--quiet -p '' --raw </dev/null", 1, "", "no tokens");
}

/* The steps of a forward. Layers with the same steps are printed once. */
static void test_cli_program(void) {
    static const char *const want[] = {
        "\n  embed             -> X                                         128  token_embd 512 x 64 BF16\n",
        "\n layer 0\n  linear            norm(X) -> Q K V                          65,536  attn_q 256 x 64 BF16, "
        "attn_k "
        "128 x 64 BF16, attn_v 128 x 64 BF16\n  attention         Q K V -> ATT\n",
        ", ffn_down_exps 2 of 8 x 64 x 192 BF16\n layer 1\n  linear            norm(X + OUT) -> Q K V ",
        "\n  last_reduce       X + OUT -> X\n"};
    char *out = NULL, *lines = NULL;
    CHECK_INT(run_command(MOE_BIN " --info --verbose -m " FIXTURES "qwen3moe.gguf", &out, NULL), 0, "--info --verbose");
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) CHECK_HAS(sb_cstr(&out), want[i], "step %zu", i);
    CHECK_INT(run_command(MOE "--info --verbose", &lines, NULL), 0, "--info --verbose");
    CHECK_HAS(sb_cstr(&lines), "\n layers ", "equal layers");
    CHECK(!strstr(sb_cstr(&out), "\ndraft "), "a model without an MTP layer has drafts");
    arrsetlen(out, 0);
    CHECK_INT(run_command(MOE_BIN " --info --verbose -m " FIXTURES "deepseek_v3_mtp.gguf", &out, NULL), 0, "MTP");
    CHECK_HAS(sb_cstr(&out), "\ndraft         the same of the MTP layer\n  embed             -> X ", "a draft");
    CHECK_HAS(sb_cstr(&out), "eh_proj ", "the MTP layer's input");
    arrfree(out);
    arrfree(lines);
}

static void test_cli_info(void) {
    char *out = NULL;
    CHECK(run_command(MOE "--info", &out, NULL) == 0, "--info failed");
    const char *want[] = {"deepseek2",
                          "moe-demo",
                          "65,536",
                          "2 of 4 groups",
                          "NVFP4",
                          "layer 0: dense, layers 1-5: 16\n",
                          "temp 0.6, top-k 20, top-p 0.95"};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        CHECK(strstr(sb_cstr(&out), want[i]), "--info does not say '%s'", want[i]);
    arrsetlen(out, 0);
    CHECK(run_command(MOE_BIN " --info --synth gpt-oss-20b:layers=3", &out, NULL) == 0, "--info failed");
    CHECK(strstr(sb_cstr(&out), "attention     layers 0, 2: 64 heads") &&
              strstr(out, "attention     layer 1: 64 heads"),
          "%s", sb_cstr(&out));
    arrfree(out);
}

/* What --info says of indexers: of every layer, of some layers, of a pattern, of none. Each would fail if layers with
 * and without an indexer were taken for the same, or if a number were that of another field. */
static void test_cli_info_indexer(void) {
    static const struct {
        const char *fixture, *synth; /* one of them */
        const char *want;            /* from the line on attention on; NULL: no line on an indexer */
    } t[] = {{"deepseek_v32", NULL, "low-rank query\nindexer       4 heads of 64, a query sees 16 keys\nexperts "},
             {"glm_moe_dsa_types", NULL,
              "low-rank query\nindexer       layers 0, 3: 6 heads of 64, a query sees 16 keys\n"
              "no indexer    layers 1-2, 4: a query sees the keys chosen in the layer before\nexperts "},
             {NULL, "glm-5", "low-rank query\nindexer       32 heads of 128, a query sees 2048 keys\nexperts "},
             {NULL, "glm-5.2",
              "low-rank query\nindexer       layers 0-2, 6, 10, .. (21): 32 heads of 128, a query sees 2048 keys\n"
              "no indexer    layers 3-5, 7-9, 11-13, .. (57): a query sees the keys chosen in the layer before\n"
              "experts "},
             {"deepseek_v4", NULL,
              "attention     layers 2, 4: 4 heads, 1 KV heads, key 64 (16 rotary), value 64, sinks, window of 16, "
              "compressed keys of 4 tokens\n"
              "attention     layer 3: 4 heads, 1 KV heads, key 64 (16 rotary), value 64, sinks, window of 16, "
              "compressed keys of 128 tokens\n"
              "indexer       layers 2, 4: 16 heads of 64, a query sees 8 compressed keys\n"
              "experts       3 used per token of width 64, square root of softplus router, shared width 64, by token "
              "ids in 3 layers\n"},
             {NULL, "minimax-m3",
              "attention     64 heads, 4 KV heads, key 128 (64 rotary), value 128\n"
              "indexer       layers 3-59: 4 heads of 128, a query sees 2048 keys in blocks of 128\nexperts "},
             {NULL, "deepseek-v3", NULL}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[512], *out = NULL;
        if (t[i].fixture)
            snprintf(cmd, sizeof cmd,
                     CONVERT_BIN " tests/fixtures/%s --name same -o %s/info.gguf && " MOE_BIN " --info -m %s/info.gguf",
                     t[i].fixture, test_dir(), test_dir());
        else snprintf(cmd, sizeof cmd, MOE_BIN " --info --synth %s </dev/null", t[i].synth);
        CHECK_INT(run_command(cmd, &out, NULL), 0, "%s", cmd);
        if (t[i].want) CHECK_HAS(sb_cstr(&out), t[i].want, "%s", cmd);
        else CHECK(!strstr(sb_cstr(&out), "indexer"), "%s: %s", cmd, sb_cstr(&out));
        arrfree(out);
        check_command(IN_DIR("rm -f @/info.gguf"), 0, "", NULL);
    }
}

static void test_cli_stdout_full(void) {
    if (access("/dev/full", W_OK)) SKIP("there is no /dev/full");
    check_command(MOE "--greedy --think off -p hi </dev/null >/dev/full", 1, NULL, "cannot write");
    check_command(MOE "--greedy -n 1 -p hi </dev/null >&-", 1, "", "cannot write to stdout: Bad file");
    check_command(CONVERT_BIN " --help >/dev/full", 1, "", "cannot write to stdout");
    check_command(CONVERT_BIN " --version >/dev/full", 1, "", "cannot write to stdout");
    check_command(IN_DIR(MOE "--ids 1,2 --logits @/none/x.npy </dev/null"), 1, "", "/none/x.npy");
    static const char *const modes[] = {"--help", "--man",      "--completion=zsh", "--version",
                                        "--info", "--tokenize", "--render"};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        char cmd[256];
        snprintf(cmd, sizeof cmd,
                 "echo '{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}' | " MOE "%s >/dev/full", modes[i]);
        check_command(cmd, 1, NULL, "cannot write to stdout");
    }
}

/* Only a file is replaced. */
static void test_cli_temporary(void) {
    check_command(IN_DIR("mkfifo @/fifo; " MOE "--ids 1 --logits @/fifo </dev/null"), 1, "",
                  "it is not a regular file");
    check_command(IN_DIR("[ -p @/fifo ]"), 0, NULL, NULL);
    check_command(IN_DIR(MOE_BIN " -m @/fifo --info </dev/null"), 1, "", "not a regular file");
    /* what a symbolic link leads to is replaced, but not by the model's logits */
    check_command(IN_DIR("echo old >@/real; ln -s real @/link; " MOE "--ids 1 --logits @/link </dev/null && "
                         "[ -L @/link ] && head -c 6 @/real"),
                  0, "\x93NUMPY", NULL);
    check_command(IN_DIR("ln -s $PWD/build/demo.gguf @/demo; " MOE "--ids 1 --logits @/demo </dev/null"), 1, "",
                  "--logits would replace the model");
    check_command(MOE_BIN " --synth qwen3-30b-a3b:1 --info -m build/demo.gguf </dev/null", 1, "", "File exists");
}

/* What a signal ends leaves nothing after. */
static void test_cli_terminate(void) {
    if (SANITIZED) SKIP("the sanitizers fill 300 MB of weights too slowly");
    check_command(IN_DIR(MOE_BIN " --synth qwen3-30b-a3b:1 --bench -m @/synth.gguf </dev/null & p=$!; "
                                 "until ls @/synth.gguf* || ! kill -0 $p; do sleep 0.01; done; kill -TERM $p; wait $p"),
                  128 + SIGTERM, NULL, NULL);
    check_command(IN_DIR("ls @/synth.gguf*"), 2, "", NULL);
}

/* MOE_MODEL is no file to write to. */
static void test_cli_synth_memory(void) {
    if (SANITIZED) SKIP("the sanitizers fill 300 MB of weights too slowly");
    char *out = NULL;
    run_command("MOE_MODEL=build/demo.gguf " MOE_BIN " --synth qwen3-30b-a3b:1 --info </dev/null", &out, NULL);
    CHECK_HAS(sb_cstr(&out), "18 in memory,", "--synth with MOE_MODEL");
    arrfree(out);
}

/* The shapes of --synth, whole and cut, by what --info finds in them. */
static void test_cli_synth(void) {
    static const struct {
        const char *args, *want[4];
    } t[] = {
        {"qwen3-235b-a22b:3 --shard 7/8",
         {"layers        3 (0 dense)", "8 heads, 1 KV heads, key 128", "width 192, softmax router, shared width 0",
          "layers 0-2: 128"}},
        {"deepseek-v3:experts=16,layers=4",
         {"layers        4 (3 dense)", "128 heads, latent 512, key 192 (64 rotary), value 128, low-rank query",
          "width 2048, sigmoid router, shared width 2048, 4 of 8 groups", "layers 0-2: dense, layer 3: 16"}},
        {"deepseek-v3:layers=61 --shard 0/4",
         {"hidden        7168, vocabulary 129280, trained context 163,840", "32 heads, latent 512",
          "width 512, sigmoid router, shared width 512", "layers 3-60: 256"}},
        {"kimi-k2:layers=2 --shard 1/2",
         {"hidden        7168, vocabulary 163840, trained context 131,072", "32 heads, latent 512",
          "8 used per token of width 1024, sigmoid router, shared width 1024\n", "layer 1: 384"}},
        {"deepseek-v4:layers=5,experts=8 --shard 1/4",
         {"layers 0-1, 3: 32 heads, 1 KV heads, key 512 (64 rotary), value 512, sinks, window of 128, compressed keys "
          "of "
          "128 tokens",
          "layers 2, 4: 64 heads of 128, a query sees 1024 compressed keys", "6 used per token of width 768, ",
          "by token ids in 3 layers"}},
        {"minimax-m3:layers=4,experts=4 --shard 1/4",
         {"attention     16 heads, 1 KV heads, key 128 (64 rotary)", "layer 3: 1 heads of 128, a query sees 2048 keys",
          "4 used per token of width 768, sigmoid router, shared width 768\n", "layers 0-2: dense, layer 3: 4"}}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[256], *out = NULL;
        snprintf(cmd, sizeof cmd, MOE_BIN " --synth %s --info </dev/null", t[i].args);
        int rc = run_command(cmd, &out, NULL);
        for (int k = 0; k < 4; k++)
            CHECK(rc == 0 && strstr(sb_cstr(&out), t[i].want[k]), "%s: '%s' is not in: %s", t[i].args, t[i].want[k],
                  sb_cstr(&out));
        arrfree(out);
    }
}

/* What --bench prints with one run of each forward; stb_ds, freed by the caller. memory: of experts in MiB, NULL: all. Returns the
 * exit code. */
static int bench_once(char **out, char *context, char *memory) {
    char *argv[] = {"moe",
                    "--cpu",
                    "-t",
                    "1",
                    "--bench",
                    "-c",
                    context,
                    "-m",
                    "build/demo.gguf",
                    "--haystack",
                    "prompts/haystack.txt",
                    "--expert-memory",
                    memory};
    const int n_arg = sizeof argv / sizeof *argv - (memory ? 0 : 2);
    char err[ERR_MAX] = "", path[256];
    struct settings set;
    struct engine e;
    double *const budget = &bench_budget[0], whole = *budget;
    snprintf(path, sizeof path, "%s/bench.csv", test_dir());
    settings_init(&set);
    CHECK(!options_parse(&set, n_arg, argv, err), "%s", err);
    engine_open(&e, &set);
    fflush(stdout);
    const int list = dup(STDOUT_FILENO), said = dup(STDERR_FILENO);
    const int file = open(path, O_WRONLY | O_CREAT, 0600), null = open("/dev/null", O_WRONLY);
    dup2(file, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    *budget = 0;
    const int rc = mode_bench(&e);
    *budget = whole;
    fflush(stdout);
    dup2(list, STDOUT_FILENO);
    dup2(said, STDERR_FILENO);
    close(list), close(said), close(file), close(null);
    engine_close(&e);
    settings_free(&set);
    CHECK(!read_file(path, out, err), "%s", err);
    return rc;
}

/* The table of --bench: its columns, its rows, and how they hang together. */
static void test_cli_bench(void) {
    char *out = NULL, *p;
    int rc = bench_once(&out, "4112", NULL), row = 0;
    const char *head = "ctx_tokens,prefill_tokens,prefill_tps,prefill_percent_of_mma,batch,gen_tps,kvcache_bytes,"
                       "gen_gb_per_s,gen_percent_of_bandwidth\n";
    CHECK(rc == 0 && !strncmp(sb_cstr(&out), head, strlen(head)), "%d: %s", rc, sb_cstr(&out));
    for (p = strchr(sb_cstr(&out), '\n'); p && p[1] && p[1] != '\n'; p = strchr(p + 1, '\n'), row++) {
        int depth = -1, prefill = -1, batch = -1;
        double pre_tps = 0, tps = 0, cache = -1, gbs = 0, percent = 0;
        int n = row % 5 ? sscanf(p + 1, "%d,,,,%d,%lf,%lf,%lf,%lf", &depth, &batch, &tps, &cache, &gbs, &percent)
                        : sscanf(p + 1, "%d,%d,%lf,,%d,%lf,%lf,%lf,%lf", &depth, &prefill, &pre_tps, &batch, &tps,
                                 &cache, &gbs, &percent);
        CHECK(n == (row % 5 ? 6 : 8) && depth == row / 5 * 4096 && batch == 1 << row % 5 && tps > 0 && gbs > 0 &&
                  percent > 0 && (depth > 0) == (cache > 0),
              "row %d: %.100s", row, p + 1);
        if (row % 5 == 0) CHECK(prefill == (row ? 16 : 512) && pre_tps > 0, "row %d: %.100s", row, p + 1);
    }
    CHECK(row == 10, "%d rows", row);
    static const char drafts[] = "\n\ndrafts,tokens_per_round,round_steps,gen_tps,right\n0,1.00,1.00,";
    if (CHECK(p && !strncmp(p, drafts, strlen(drafts)), "%s", p)) {
        p = strchr(p + 2, '\n');
        for (row = 0; p && p[1]; p = strchr(p + 1, '\n'), row++) {
            double tokens = 0, steps = 0, tps = 0;
            int least = -1, most = -1;
            const int n = row < 4 ? sscanf(p + 1, "%d,%lf,%lf,%lf", &least, &tokens, &steps, &tps)
                                  : sscanf(p + 1, "%d-%d,%lf,%lf,%lf", &least, &most, &tokens, &steps, &tps);
            CHECK(n == (row < 4 ? 4 : 5) && least == row % 4 && tokens >= 1 && tokens <= 4 && steps > 0 && tps > 0,
                  "row %d: %.100s", row, p + 1);
            CHECK(row < 1 || row > 3 || tokens > 1.5, "row %d: %.2f tokens a round", row, tokens);
        }
        CHECK(row == 5, "%d rows", row);
    }
    arrfree(out);
}

/* The table of experts that are not all in memory. */
static void test_cli_bench_experts(void) {
    char *out = NULL;
    const char *head = "\n\ngen_tps,expert_hit_percent,expert_copied_bytes,expert_gb_per_s\n", *p;
    char err[ERR_MAX];
    struct model m;
    const int rc = bench_once(&out, "600", "5");
    double tps = 0, hits = 0, bytes = 0, rate = 0, all = 0;
    if (!CHECK(!model_load(&m, "build/demo.gguf", err), "%s", err)) return;
    for (int il = 0; il < m.n_layer; il++)
        all += (double)m.layers[il].n_expert_used * (double)expert_bytes(&m.layers[il]);
    p = strstr(sb_cstr(&out), head);
    CHECK(!rc && p && sscanf(p + strlen(head), "%lf,%lf,%lf,%lf", &tps, &hits, &bytes, &rate) == 4, "%s", out);
    CHECK(tps > 0 && hits > 20 && hits < 80 && fabs(bytes / all - (1 - hits / 100)) < 0.01 && rate > 0,
          "%.1f tok/s, %.1f %% hits, %.0f of %.0f bytes, %.2f GB/s", tps, hits, bytes, all, rate);
    model_free(&m);
    arrfree(out);
}

/* --n-depth: the table has that depth only, and --profile is of it. A query of deepseek_v32 sees 16 keys of 1001: it reads
 * 1001 keys of the indexer, 64 values in BF16, and 16 rows of 64 + 16 beside wk_b and wv_b. Catches a profile
 * of another depth, and a choice whose rows are all counted. */
static void test_cli_bench_depth(void) {
    char *out = NULL, *said = NULL;
    const char *const run =
        CONVERT_BIN " tests/fixtures/deepseek_v32 --name same -o @/depth.gguf 2>@/log && " MOE_BIN
                    " -m @/depth.gguf --cpu -t 1 --kv bf16 --bench --profile -c 1016 -d 1000 </dev/null";
    const int rc = run_command(IN_DIR(run), &out, &said);
    const char *p = strchr(sb_cstr(&out), '\n'), *from = strstr(sb_cstr(&said), "\nbatch 1 "), *to = NULL;
    CHECK(rc == 0 && p && !strncmp(p + 1, "1000,16,", 8), "%d: %s%s", rc, sb_cstr(&out), sb_cstr(&said));
    int rows = 0;
    for (; p && p[1]; p = strchr(p + 1, '\n'), rows++) CHECK(!strncmp(p + 1, "1000,", 5), "%s", p + 1);
    CHECK_INT(rows, 5, "%s", sb_cstr(&out));
    to = from ? strstr(from, "\nbatch 2 ") : NULL;
    if (CHECK(from && to, "%s", sb_cstr(&said))) {
        static const struct {
            const char *name;
            int bytes; /* of each of 3 layers */
        } t[] = {{"\nindexer: scores ", 1001 * 64 * 2},
                 {"\nlatent attention ", 16 * (64 + 16) * 2 + 4 * 64 * (32 + 32) * 2}};
        for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
            const char *at = strstr(from, t[i].name);
            int calls = 0;
            double us = 0, bytes = 0;
            CHECK(at && at < to && sscanf(at + strlen(t[i].name), "%d %lf %lf", &calls, &us, &bytes) == 3 &&
                      calls == 3 && (int)bytes == t[i].bytes,
                  "%d calls of %.0f bytes, expected %d: %s", calls, bytes, t[i].bytes, from);
        }
    }
    arrfree(out);
    arrfree(said);
}

/* measure.sh with stubs in place of all programs, three of which fail: the report has every step, tables as tables, the
 * machine, and at the end what failed. */
static void test_cli_measure(void) {
    static const char *const want[] = {
        "# moe on Stub 9000\n\n| machine | |\n|---|---|\n| GPU | Stub 9000, capability 12.0, ",
        "\n| nvcc | 13.0, V13.0.1 |\n",
        "\n| PCIe | generation -, - lanes |\n",
        "\n| version | " MOE_VERSION ", ",
        "\n## build: ok, ",
        "\n```\na.c:1: warning: a stub\n```\n",
        "\n## test_gpu: FAILED, exit code 124 (not done in 120 s), ",
        "\nIts last lines:\n\n```\nok   cuda/gemv\n```\n",
        "\n## decode: FAILED, exit code 1, ",
        "\n### A shape\n\n| tokens | switches | us |\n|---|---|---|\n| 1 | all on | 5.0 |\n| 1 | x | OTHER BITS "
        "|\n\n## needle: ",
        "\n## ranks-0,0,0,0: ok, ",
        "\n```\nall-reduce 5 us\nctx_tokens,batch\n0,1\n```\n",
        "\n| fp8 | 5.00 | cpu | 4.99 | +0.20 | 0.5 |\n| bf16 | 4.99 | cpu | 4.99 | +0.00 | 0.5 |\n"
        "| w4a4 | 5.10 | fp8 | 5.00 | +2.00 | 5 |\n\n",
        "qwen3-235b-a22b: 15 of 48 layers, 40000 MiB of weights, 9000 MiB of memory free\n\n## bench-qwen3-235b-a22b: "
        "ok, ",
        "\n```\nall-reduce 5 us\nctx_tokens,batch\n0,1\nk_embed 1 of 2\nbatch 1: 6.0 kernels per layer\n```\n",
        "\n## tiles: ok, ",
        "\n| GEMM | us |\n|---|---|\n| a | 1 |\n",
        "\n## upload: ok, ",
        "\n## experts: ok, ",
        "\n## bench-experts: ok, ",
        "\n## sanitizer: FAILED, exit code 139, ",
        "\n## What failed\n\n- test_gpu: FAILED, exit code 124 (not done in 120 s)\n- decode: FAILED, exit code 1\n"
        "- sanitizer: FAILED, exit code 139\n\n"};
    char *out = NULL, *report = NULL, err[ERR_MAX];
    int rc = run_command(
        IN_DIR("cd @ && mkdir -p tests build bin prompts && cp ../../../tests/measure.sh tests && : "
               ">prompts/haystack.txt &&"
               " grep 'define MOE_VERSION' ../../../moe.c >moe.c && for p in moe build/test_gpu build/bench_tiles "
               "build/bench_decode bin/nvidia-smi bin/nvcc bin/make bin/compute-sanitizer; do "
               "ln -s \"$OLDPWD/tests/measure_stub.sh\" $p; done && PATH=$PWD/bin:$PATH tests/measure.sh"),
        &out, NULL);
    CHECK_INT(rc, 1, "%s", sb_cstr(&out));
    CHECK_HAS(sb_cstr(&out), "\ndecode: FAILED, exit code 1, ", "stdout");
    CHECK_HAS(sb_cstr(&out), "s; some steps FAILED; the report is build/measured/report.md\n", "stdout");
    if (!CHECK(!read_file(IN_DIR("@/build/measured/report.md"), &report, err), "%s", err)) return;
    const char *at = sb_cstr(&report);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        const char *found = strstr(at, want[i]);
        if (CHECK(found, "not after the one before it: '%s' in:\n%s", want[i], report))
            at = found + strlen(want[i]) - 1;
    }
    arrfree(out);
    arrfree(report);
}

/* Ctrl-C while it reads its stdin, and in the middle of a test. */
static void test_cli_interrupt(void) {
    static const struct {
        const char *mode, *after; /* what is printed before the Ctrl-C; NULL: it has read what was written */
    } t[] = {{"", NULL},        {"--tokenize", NULL},    {"--render", NULL},
             {"--lines", NULL}, {"--lines --raw", NULL}, {"--smoke --cpu-ref", "\n"}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct child p;
        char cmd[256];
        snprintf(cmd, sizeof cmd, "exec " MOE "%s", t[i].mode);
        if (!child_start(&p, cmd)) return;
        if ((t[i].after || child_write(&p, "x", 1)) && child_expect(&p, t[i].after)) child_interrupt(&p);
        CHECK_INT(child_end(&p, NULL, NULL), EXIT_INTERRUPT, "moe %s", t[i].mode);
    }
}

/* --logits writes what NumPy reads: magic, header length, shape, and the bytes. */
static void test_cli_logits(void) {
    char *npy = NULL, err[ERR_MAX];
    check_command(IN_DIR(MOE "--cpu-ref --kv f32 --ids 8188,361,198 --logits @/x.npy </dev/null"), 0, "", NULL);
    if (!CHECK(read_file(IN_DIR("@/x.npy"), &npy, err) == 0, "%s", err)) return;
    CHECK(arrlenu(npy) == 128 + 3 * 8192 * 4 && !memcmp(npy, "\x93NUMPY\1\0v\0", 10), "%zu bytes", arrlenu(npy));
    CHECK(strstr(npy + 10, "'shape': (3, 8192)"), "header '%.100s'", npy + 10);
    float x[8192];
    double sum = 0;
    memcpy(x, npy + 128, sizeof x);
    for (int i = 0; i < 8192; i++) sum += (double)x[i] * (double)x[i];
    CHECK(fabs(sqrt(sum) - 441.099) < 0.01, "the norm of the first row is %.3f, Hugging Face has 441.099", sqrt(sum));
    arrfree(npy);
}

/* Greedy text does not depend on threads or on the run. */
static void test_cli_determinism(void) {
    char *a = NULL, *b = NULL, *c = NULL;
    run_command(MOE "--greedy -p 'Tell me a story about a fox and a lantern.' -t 1 --show-think on </dev/null", &a,
                NULL);
    run_command(MOE "--greedy -p 'Tell me a story about a fox and a lantern.' -t 3 --show-think on </dev/null", &b,
                NULL);
    run_command(MOE "--seed 5 -p 'Tell me a story about a fox and a lantern.' </dev/null", &c, NULL);
    CHECK(arrlen(a) > 100 && !strcmp(sb_cstr(&a), sb_cstr(&b)), "1 and 3 threads answer differently");
    char *d = NULL;
    run_command(MOE "--seed 5 -p 'Tell me a story about a fox and a lantern.' </dev/null", &d, NULL);
    CHECK(arrlen(c) > 50 && !strcmp(sb_cstr(&c), sb_cstr(&d)), "one seed gives two answers");
    arrfree(a);
    arrfree(b);
    arrfree(c);
    arrfree(d);
}

static void test_cli_needle(void) {
    check_command(MOE "--needle 1000 --depth 10 </dev/null", 0, NULL, "found");
    check_command(MOE "--needle 1000 --depth 90 --kv fp8 </dev/null", 0, NULL, "found");
}

/* 1,000 and 4,000 tokens of books. */
static void test_cli_needle_books(void) {
    static const struct {
        int n, depth;
        const char *kv;
    } t[] = {{1000, 10, "bf16"}, {1000, 50, "fp8"}, {1000, 90, "bf16"}, {4000, 10, "fp8"}};
    const char *hay = shared_path("prose/haystack.txt");
    if (SANITIZED) SKIP("it takes minutes under sanitizers and calls nothing that others do not");
    if (!hay) SKIP("../shared/prose is absent");
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[512];
        snprintf(cmd, sizeof cmd, MOE "--needle %d --depth %d --kv %s --haystack %s </dev/null", t[i].n, t[i].depth,
                 t[i].kv, hay);
        check_command(cmd, 0, NULL, "found");
    }
}

static void test_cli_smoke(void) { check_command(MOE "--smoke </dev/null", 0, NULL, "C needle"); }

/* Memory that is available lies between what is unused and all that there is. */
static void test_cli_memory_available(void) {
    double have = (double)memory_available(), page = (double)sysconf(_SC_PAGESIZE),
           unused = page * (double)sysconf(_SC_AVPHYS_PAGES), all = page * (double)sysconf(_SC_PHYS_PAGES);
    CHECK(have > 0.5 * unused && have < all, "%g bytes are available, %g unused, %g in all", have, unused, all);
}

/* A fact in 8,000 tokens of the shipped stories is found, and all of the program lives in 150 MiB of memory meanwhile.
 * */
static void test_cli_needle_long(void) {
    if (SANITIZED) SKIP("it takes minutes under sanitizers, which need memory of their own");
    struct child p;
    char *said = NULL;
    if (!child_start(&p, "exec " MOE "--needle 8000 --depth 50")) return;
    CHECK_INT(child_end(&p, NULL, &said), 0, "%s", sb_cstr(&said));
    CHECK_HAS(said, "found", "--needle");
    CHECK(p.usage.ru_maxrss > 1000 && p.usage.ru_maxrss < 150 * 1024, "%ld KiB", p.usage.ru_maxrss);
    arrfree(said);
}

/* ---- what the README says ---- */

/* Whether `name` (n bytes, without the dashes) is an option of the program. */
static bool is_option(const char *name, size_t n) {
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].name && !strncmp(options[i].name, name, n) && !options[i].name[n]) return true;
    return false;
}

/* Every option in README.md and convert/README.md is one of moe, moe-convert or moe-reap, or of a command that is
 * named. */
static void test_readme_options(void) {
    static const char *const files[] = {"README.md", "convert/README.md"};
    static const char *const foreign[] = {"local-dir", "jinja", "grammar"}; /* of hf download, of llama.cpp */
    char *help = NULL;
    run_command(CONVERT_BIN " --help; " REAP_BIN " --help", &help, NULL);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *text = NULL, err[ERR_MAX], line[80];
        int found = 0;
        if (!CHECK(read_file(files[i], &text, err) == 0, "%s", err)) continue;
        for (const char *p = sb_cstr(&text); (p = strstr(p, "--"));) {
            const size_t n = strspn(p + 2, "abcdefghijklmnopqrstuvwxyz0123456789-");
            const bool option = n && p[2] != '-' && (p == text || strchr(" \n`(|", p[-1]));
            if (option) {
                bool known = is_option(p + 2, n);
                snprintf(line, sizeof line, "  --%.*s ", (int)n, p + 2);
                known |= strstr(sb_cstr(&help), line) != NULL;
                for (size_t k = 0; k < sizeof foreign / sizeof *foreign; k++)
                    known |= n == strlen(foreign[k]) && !strncmp(p + 2, foreign[k], n);
                CHECK(known, "%s names --%.*s, which is no option", files[i], (int)n, p + 2);
                found++;
            }
            p += 2 + n;
        }
        CHECK(found > 20, "only %d options in %s", found, files[i]);
        arrfree(text);
    }
    arrfree(help);
}

/* The words in backquotes of column `column` of the table whose head line is `head`, in order, each after a blank. */
static char *readme_column(const char *file, const char *head, int column) {
    char *text = NULL, *words = NULL, err[ERR_MAX];
    CHECK(read_file(file, &text, err) == 0, "%s", err);
    const char *p = strstr(sb_cstr(&text), head);
    if (CHECK(p, "%s has no table '%s'", file, head))
        for (p = strchr(strchr(p, '\n') + 1, '\n') + 1; *p == '|'; p = strchr(p, '\n') + 1) {
            const char *cell = p + 1, *end;
            for (int i = 0; i < column; i++) cell = strchr(cell, '|') + 1;
            for (end = strchr(cell, '|'); (cell = memchr(cell, '`', (size_t)(end - cell))); cell++) {
                const size_t n = strcspn(++cell, "`");
                sb_printf(&words, " %.*s", (int)n, cell);
                cell += n;
            }
        }
    sb_cstr(&words);
    arrfree(text);
    return words;
}

/* The families in the tables of the documents are those of moe.c and moe-convert. */
static void test_readme_families(void) {
    static const char *const tables[][2] = {{"README.md", "| GGUF architecture | Hugging Face `model_type` |"},
                                            {"convert/README.md", "| `model_type` | GGUF architecture |"}};
    char *help = NULL;
    run_command(CONVERT_BIN " --help", &help, NULL);
    for (int i = 0; i < 2; i++) {
        char *arch = readme_column(tables[i][0], tables[i][1], i),
             *types = readme_column(tables[i][0], tables[i][1], !i);
        for (int k = 0; k < FAMILIES; k++) CHECK_HAS(arch, families[k].arch, "the table of %s", tables[i][0]);
        for (const char *p = arch; *p == ' ';) {
            const size_t n = strcspn(++p, " ");
            bool known = false;
            for (int k = 0; k < FAMILIES; k++)
                known |= strlen(families[k].arch) == n && !strncmp(families[k].arch, p, n);
            CHECK(known, "%s lists %.*s, which moe does not load", tables[i][0], (int)n, p);
            p += n;
        }
        /* "Models: a, b, c." in the help of moe-convert */
        char *listed = NULL;
        const char *p = strstr(sb_cstr(&help), "Models: ");
        for (p = p ? p + strlen("Models:") : ""; *p == ' ' || *p == ',';) {
            p += strspn(p, ", \n");
            const size_t n = strcspn(p, ",.\n");
            sb_printf(&listed, " %.*s", (int)n, p);
            p += n;
        }
        CHECK_STR(types, sb_cstr(&listed), "the model types of %s and of moe-convert --help", tables[i][0]);
        arrfree(listed);
        arrfree(arch);
        arrfree(types);
    }
    arrfree(help);
}

/* The number of tiny models in README.md is that of the directories in tests/fixtures. */
static void test_readme_models(void) {
    char *text = NULL, want[64], err[ERR_MAX];
    int n = 0;
    DIR *dir = opendir("tests/fixtures");
    if (!CHECK(dir && !read_file("README.md", &text, err), "no tests/fixtures or README.md")) return;
    for (const struct dirent *e; (e = readdir(dir));) n += !strchr(e->d_name, '.');
    closedir(dir);
    snprintf(want, sizeof want, "checked with the demo model and %d tiny ones;", n);
    CHECK_HAS(sb_cstr(&text), want, "the table of what has run");
    arrfree(text);
}

/* The shapes after "`--synth` knows" in README.md are those of the table, in its order. */
static void test_readme_shapes(void) {
    char *text = NULL, *want = NULL, *found = NULL, err[ERR_MAX];
    if (!CHECK(read_file("README.md", &text, err) == 0, "%s", err)) return;
    for (size_t i = 0; i < sizeof synths / sizeof *synths; i++) sb_printf(&want, " %s", synths[i].name);
    const char *p = strstr(sb_cstr(&text), "`--synth` knows");
    for (p = p ? strchr(p, 's') + strlen("synth` knows") : ""; *p;) {
        p += strspn(p, ", \n");
        if (!strncmp(p, "and ", 4)) p += 4;
        if (*p != '`') break;
        const size_t n = strcspn(++p, "`");
        sb_printf(&found, " %.*s", (int)n, p);
        p += n + 1;
    }
    CHECK_STR(sb_cstr(&found), sb_cstr(&want), "the shapes of --synth in README.md");
    arrfree(text);
    arrfree(want);
    arrfree(found);
}

#define TESTS_CLI                                                                                                  \
    {"cli/pipe", test_cli_pipe}, {"cli/system", test_cli_system}, {"cli/lines", test_cli_lines},                   \
        {"cli/jsonl", test_cli_jsonl}, {"cli/alone", test_cli_alone}, {"cli/continue", test_cli_continue},         \
        {"cli/bad-line", test_cli_bad_line}, {"cli/temporary", test_cli_temporary},                                \
        {"cli/terminate", test_cli_terminate}, {"cli/interrupt", test_cli_interrupt}, {"cli/raw", test_cli_raw},   \
        {"cli/tokenize", test_cli_tokenize}, {"cli/render", test_cli_render}, {"cli/usage", test_cli_usage},       \
        {"cli/help", test_cli_help}, {"cli/unused", test_cli_unused}, {"cli/dense", test_cli_dense},               \
        {"cli/llama-cli", test_cli_llama}, {"cli/options", test_cli_options}, {"cli/quiet", test_cli_quiet},       \
        {"cli/find-model", test_cli_find_model}, {"cli/version", test_cli_version}, {"cli/info", test_cli_info},   \
        {"cli/program", test_cli_program}, {"cli/info-indexer", test_cli_info_indexer},                            \
        {"cli/stdout-full", test_cli_stdout_full}, {"cli/logits", test_cli_logits},                                \
        {"cli/determinism", test_cli_determinism}, {"cli/needle", test_cli_needle},                                \
        {"cli/needle-books", test_cli_needle_books}, {"cli/smoke", test_cli_smoke},                                \
        {"cli/memory-available", test_cli_memory_available}, {"cli/needle-long", test_cli_needle_long},            \
        {"cli/synth", test_cli_synth}, {"cli/synth-memory", test_cli_synth_memory}, {"cli/bench", test_cli_bench}, \
        {"cli/bench-experts", test_cli_bench_experts}, {"cli/bench-depth", test_cli_bench_depth},                  \
        {"cli/measure", test_cli_measure}, {"readme/options", test_readme_options},                                \
        {"readme/families", test_readme_families}, {"readme/models", test_readme_models},                          \
        {"readme/shapes", test_readme_shapes},
