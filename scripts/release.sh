#!/usr/bin/env bash
# Build the last commit's release in dist/: wheel, sdist, locked requirements, bill of materials and SHA256SUMS.
# Install the wheel with the locked hashes in a clean environment and test it there. Sets no tag.
set -euo pipefail
cd "$(dirname "$0")/.."

changes=$(git status --porcelain --untracked-files=all)
if [ -n "$changes" ]; then
	printf '%s\n' "error: the checkout has uncommitted changes:" "$changes" \
		"hint: commit them, or set them aside with \`git stash --include-untracked\`" >&2
	exit 1
fi

python=$PWD/.venv/bin/python
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work"/{first,second,sdist,home}

# Builds in two directories must produce the same files, and the sdist must produce the same wheel.
for build in first second; do
	git archive HEAD | tar -x -C "$work/$build"
	(cd "$work/$build" && "$python" -m hatchling build --directory dist)
	(cd "$work/$build/dist" && sha256sum -- *) | sed "s/^/$build build  /"
done
diff --recursive "$work/first/dist" "$work/second/dist"
version=$(cd "$work/first" && "$python" -m hatchling version)
wheel=vlaunch-$version-py3-none-any.whl
if ! grep --max-count 1 '^## ' CHANGELOG.md | grep --quiet --fixed-strings "## $version "; then
	echo "error: the first entry of CHANGELOG.md is not $version, the version in launcher/__init__.py" >&2
	exit 1
fi
tar -xzf "$work/first/dist/vlaunch-$version.tar.gz" -C "$work/sdist" --strip-components 1
(cd "$work/sdist" && "$python" -m hatchling build --target wheel --directory dist)
cmp "$work/first/dist/$wheel" "$work/sdist/dist/$wheel"

cd "$work/first/dist"
cp "$work/first/requirements-runtime.lock" "vlaunch-$version-requirements.txt"
echo "vlaunch==$version --hash=sha256:$(sha256sum "$wheel" | cut -d ' ' -f 1)" >"$work/wheel.txt"
"$python" -m venv --without-pip "$work/clean"
"$python" -m pip --python "$work/clean" install --quiet --disable-pip-version-check --require-hashes --find-links . \
	--requirement "vlaunch-$version-requirements.txt" --requirement "$work/wheel.txt"

run() { (cd "$work/home" && env -i HOME="$work/home" PATH="$work/clean/bin:$PATH" LC_ALL=C.UTF-8 "$@"); }
run vlaunch --version | grep --fixed-strings "$version"
run vlaunch --help
run vlaunch init --help
run vlaunch up --dry-run --offline -i "$work/sdist/inventory/example.yaml" >"$work/up.sh"
bash -n "$work/up.sh"
echo "vlaunch up --dry-run: a script of $(wc -l <"$work/up.sh") lines"

sed "s/^dynamic = .*/version = \"$version\"/" "$work/first/pyproject.toml" >"$work/pyproject.toml"
"${python%/*}/cyclonedx-py" environment --output-reproducible --pyproject "$work/pyproject.toml" \
	--output-file "vlaunch-$version.cdx.json" "$work/clean"
sha256sum -- * | tee "$work/SHA256SUMS"
mv "$work/SHA256SUMS" .
cd - >/dev/null
rm -rf dist
mv "$work/first/dist" dist
