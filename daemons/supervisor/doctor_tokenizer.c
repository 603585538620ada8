#include "daemons/supervisor/doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One request of each protocol, and the member of its answer that holds the token ids. */
static const struct {
	const char *path, *member, *body; /* body: %s is the model, as a JSON string */
} question[] = {
	[KVP_TOK_VLLM_RENDER] = {"/v1/completions/render", "\"token_ids\"",
		"{\"model\":%s,\"prompt\":\"Is anybody there?\",\"max_tokens\":1}"},
	[KVP_TOK_SGLANG_RENDERER] = {"/v1/chat/completions/render", "\"input_ids\"",
		"{\"model\":%s,\"messages\":[{\"role\":\"user\",\"content\":\"Is anybody there?\"}]}"},
	[KVP_TOK_SGLANG_TOKENIZE] = {"/tokenize", "\"tokens\"",
		"{\"model\":%s,\"prompt\":\"Is anybody there?\"}"},
};

static const char *tokenizer_todo(int status)
{
	if (status == 401 || status == 403)
		return "put its bearer token into KVPICK_EPP_TOKENIZER_TOKEN_FILE";
	if (status == 404)
		return "set DYN_MODEL_NAME to the name that the engine serves, and "
		       "DYN_EPP_TOKENIZER_PROTOCOL to what the "
		       "service speaks";
	return "look into the service's log; DYN_EPP_TOKENIZER_PROTOCOL must be what it speaks";
}

static void say_tokenizer(struct doctor *d, const struct doc_http *h, int rc, const char *member)
{
	const char *url = d->cfg->tokenizer_url;
	if (rc)
		doc_say(d, DOC_FAIL, "tokenizer",
			strncmp(h->error, "TLS", 3) == 0
				? "give the certificate that vouches for it (KVPICK_EPP_TOKENIZER_CA_FILE), "
				  "and use a host that its own names"
				: "start the service, or correct DYN_EPP_TOKENIZER_SERVICE_URL",
			"%s: %s", url, h->error);
	else if (h->status != 200)
		doc_say(d, DOC_FAIL, "tokenizer", tokenizer_todo(h->status), "%s%s answered %d: %.300s", url,
			h->path, h->status, h->reply);
	else if (!strstr(h->reply, member))
		doc_say(d, DOC_FAIL, "tokenizer", "set DYN_EPP_TOKENIZER_PROTOCOL to what the service speaks",
			"%s%s answered without %s: %.300s", url, h->path, member, h->reply);
	else
		doc_say(d, DOC_OK, "tokenizer", NULL, "%s%s gave token ids for model %.200s", url, h->path,
			d->cfg->model_name);
}

void doc_tokenizer(struct doctor *d)
{
	const struct kvp_config *c = d->cfg;
	struct kvp_http_url url;
	struct kvp_jw name;
	char *model = NULL, *body = NULL;
	if (!c->eff.epp_on || c->tokenizer_protocol == KVP_CONFIG_NO_WORD ||
		c->tokenizer_protocol == KVP_TOK_TEXT || kvp_http_url_parse_any(&url, c->tokenizer_url))
		return;
	kvp_jw_init(&name);
	kvp_jw_str(&name, c->model_name);
	if (name.err == KVP_OK && asprintf(&model, "%.*s", (int)name.len, name.buf) < 0)
		model = NULL;
	kvp_jw_free(&name);
	const char *form = question[c->tokenizer_protocol].body, *at = strstr(form, "%s");
	if (model && asprintf(&body, "%.*s%s%s", (int)(at - form), form, model, at + 2) < 0)
		body = NULL;
	struct doc_http h = {.url = &url,
		.path = question[c->tokenizer_protocol].path,
		.token_file = c->tokenizer_token_file,
		.ca_file = c->tokenizer_ca_file,
		.body = body};
	if (body)
		say_tokenizer(d, &h, doc_http_call(&h), question[c->tokenizer_protocol].member);
	doc_http_free(&h);
	free(model);
	free(body);
}
