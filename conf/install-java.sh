#!/bin/sh
# Spark needs Java 17: install it where that is possible without asking, else say how.
set -eu
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing Java 17 for Spark"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y openjdk-17-jre-headless >/dev/null
  exit 0
fi
cat >&2 <<'TEXT'
Spark needs Java 17, and there is no java on the PATH. Install it and run make again:
  Debian, Ubuntu   sudo apt-get install openjdk-17-jre-headless
  Fedora, RHEL     sudo dnf install java-17-openjdk-headless
  macOS            brew install openjdk@17
TEXT
exit 1
