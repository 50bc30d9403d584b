// A trainer in JavaScript: a batch, its samples, and a push of weights.
//
//   npm ci --prefix examples/node
//   node examples/node/trainer.js ADDRESS RUN [FOLDER OF WEIGHTS]
//
// The token is in PACELINE_TOKEN. It prints one line of JSON for each sample, and one for the version that is published.
"use strict";

const path = require("node:path");
const { promisify } = require("node:util");
const grpc = require("@grpc/grpc-js");
const { loadSync } = require("@grpc/proto-loader");

const PROTOS = path.join(__dirname, "../../protos");
const CALL = { deadline: 60_000, apply: 600_000 };
const files = ["rollout", "weight"].map((name) => `paceline/v1/${name}.proto`);
// 64-bit integers do not fit JavaScript's numbers: they are strings.
const { paceline } = grpc.loadPackageDefinition(
  loadSync(files, { includeDirs: [PROTOS], keepCase: true, longs: String, enums: String, defaults: true }),
);

const [address, run, folder] = process.argv.slice(2);
const metadata = new grpc.Metadata();
if (process.env.PACELINE_TOKEN) metadata.set("authorization", `Bearer ${process.env.PACELINE_TOKEN}`);

// Call a unary method. A refusal has the time of the next attempt in RetryInfo; here one attempt a second is enough.
async function call(client, method, request, milliseconds = CALL.deadline) {
  const ends = Date.now() + milliseconds;
  for (;;) {
    try {
      return await promisify(client[method].bind(client))(request, metadata, { deadline: ends });
    } catch (error) {
      if (error.code !== grpc.status.UNAVAILABLE || Date.now() > ends) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

async function step(rollouts, number, version) {
  const batch = { run_id: run, batch_id: `step-${number}` };
  const groups = [0, 1].map((each) => ({ prompt_id: `p${each}`, prompt_token_ids: [3, 4, 5 + each], samples: 2 }));
  const sampling = { temperature: 1, max_tokens: 16 };
  await call(rollouts, "SubmitRollouts", { ...batch, step: number, policy_version: version, groups, sampling, run_seed: "7" });
  let cursor = "0";
  for (let read = 0, total = 1; read < total; ) {
    // After a lost connection the stream continues after the last sample that was read.
    try {
      for await (const event of rollouts.StreamRollouts({ ...batch, cursor }, metadata)) {
        ({ cursor, total } = event);
        if (!event.sample) continue;
        read += 1;
        const { prompt_id, slot, status } = event.sample;
        const { token_ids, logprobs } = event.sample.tokens;
        console.log(JSON.stringify({ prompt_id, slot, token_ids, logprobs, status }));
      }
    } catch (error) {
      if (error.code !== grpc.status.UNAVAILABLE) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  await call(rollouts, "AckRollouts", { ...batch, cursor });
}

async function push(weights, version) {
  const started = { run_id: run, policy_version: version, target: "WEIGHT_TARGET_POLICY", transport: "WEIGHT_TRANSPORT_DISK" };
  const { update_id } = await call(weights, "StartUpdate", started);
  await new Promise((resolve, reject) => {
    const sent = weights.UpdateWeights(metadata, { deadline: Date.now() + CALL.apply }, (error) => (error ? reject(error) : resolve()));
    sent.end({ update_id, disk: { path: path.resolve(folder) } });
  });
  return call(weights, "FinishUpdate", { update_id }, CALL.apply);
}

async function main() {
  const [rollouts, weights] = ["RolloutService", "WeightService"].map(
    (name) => new paceline.v1[name](address, grpc.credentials.createInsecure()),
  );
  const { policy_version } = await call(weights, "GetVersions", {});
  await step(rollouts, 0, policy_version);
  if (folder) {
    const next = String(BigInt(policy_version) + 1n);
    await push(weights, next);
    console.log(JSON.stringify({ policy_version: (await call(weights, "GetVersions", {})).policy_version }));
  }
  for (const client of [rollouts, weights]) client.close();
}

main().catch((error) => {
  console.error(`trainer: ${error.message}`);
  process.exitCode = 1;
});
