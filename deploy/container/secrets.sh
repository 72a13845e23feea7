#!/bin/sh
# Make the secrets of compose.yaml, once: a token and a user of Redis for each role, in deploy/container/.env, which compose reads.
#   sh deploy/container/secrets.sh
set -eu
umask 077
cd "$(dirname "$0")"
[ ! -e .env ] || { echo "deploy/container/.env is there already; delete it for new secrets" >&2; exit 1; }
secret() { openssl rand -hex 32; }
hash() { printf %s "$1" | sha256sum | cut -d' ' -f1; }
api=$(secret) consumer=$(secret) viewer=$(secret)
master_redis=$(secret) consumer_redis=$(secret) sender_redis=$(secret) auditor_redis=$(secret)
cat > .env <<END
# People log in, and programs act, with this one: it has all rights.
USHER_API_TOKEN=$api
# Handlers see these.
USHER_CONSUMER_TOKEN=$consumer
USHER_CONSUMER_REDIS=redis://consumer:$consumer_redis@redis:6379/0
USHER_VIEWER_TOKEN=$viewer
USHER_MASTER_REDIS=redis://master:$master_redis@redis:6379/0
USHER_SENDER_REDIS=redis://sender:$sender_redis@redis:6379/0
USHER_AUDITOR_REDIS=redis://auditor:$auditor_redis@redis:6379/0
USHER_TOKENS_FILE=/run/usher-tokens
USHER_TOKENS="consumer * $(hash "$consumer")
viewer prometheus $(hash "$viewer")"
USHER_REDIS_FLAGS="--aclfile /run/users.acl"
USHER_REDIS_USERS="$(grep -E '^user (default|master|consumer|sender|auditor) ' ../users.acl |
    sed -e "s/^user master off resetpass/user master on resetpass #$(hash "$master_redis")/" \
        -e "s/^user consumer off resetpass/user consumer on resetpass #$(hash "$consumer_redis")/" \
        -e "s/^user auditor off resetpass/user auditor on resetpass #$(hash "$auditor_redis")/" \
        -e "s/^user sender off resetpass/user sender on resetpass #$(hash "$sender_redis")/")"
END
echo "deploy/container/.env has them; the page asks for its USHER_API_TOKEN" >&2
